"""Optimizer and scheduler options against LeRobot's presets and torch's own optimizers."""

import copy
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig

from tests.tiny import act_config, make_policy
from util import take_optimizer
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.options.train import EmaOptions
from vla_finetuning.policies.optim import make_recipe
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.policies.trainable import TrainableReport

RUN = ["--dataset.root=/data", "--policy.type=act", "--output_dir=/out"]


def recipe(policy_config, *flags):
    return make_recipe(parse_args([*RUN, *flags]), policy_config)


def test_optimizer_options_replace_policy_preset():
    diffusion = DiffusionConfig(device="cpu")
    preset = recipe(diffusion)
    assert (preset.optimizer.type, preset.peak, preset.scheduler.name, preset.own_groups) == (
        "adam",
        1e-4,
        "cosine",
        True,
    )
    overridden = recipe(diffusion, "--optimizer.betas=[0.8, 0.9]", "--optimizer.lr", "1e-3", "--scheduler.name=linear")
    assert (overridden.optimizer.betas, overridden.peak, overridden.optimizer.weight_decay) == ((0.8, 0.9), 1e-3, 1e-6)
    assert (overridden.scheduler.name, overridden.scheduler.num_warmup_steps) == ("linear", 500)
    adamw = recipe(diffusion, "--optimizer.type=adamw").optimizer
    assert (adamw.type, adamw.betas, adamw.weight_decay) == ("adamw", (0.95, 0.999), 1e-6)
    named = ["--use_policy_training_preset=false", "--optimizer.type=adamw", "--scheduler.type=constant_with_warmup"]
    plain = recipe(diffusion, *named, "--scheduler.num_warmup_steps=2")
    assert (plain.peak, plain.optimizer.weight_decay, plain.own_groups) == (1e-3, 1e-2, False)  # the types' defaults
    assert [plain.schedule(9)(step) for step in range(4)] == [0.0, 5e-4, 1e-3, 1e-3]
    assert recipe(diffusion, "--optimizer.grad_clip_norm=0").clip_norm == float("inf")


def test_scheduler_other_than_lambda_lr_is_refused():
    class Steps(type(recipe(DiffusionConfig(device="cpu")).scheduler)):
        def build(self, optimizer, steps):
            return torch.optim.lr_scheduler.StepLR(optimizer, 10)

    preset = replace(recipe(DiffusionConfig(device="cpu")), scheduler=Steps(num_warmup_steps=1))
    with pytest.raises(ValueError, match="Steps makes a StepLR.* give --warmup_frac or --final_lr_frac"):
        preset.schedule(100)


def make_act():
    camera = PolicyFeature(FeatureType.VISUAL, (3, 32, 32))
    config = act_config({"observation.images.top": camera}, 2, optimizer_lr_backbone=2e-6)
    return config, ACTPolicy(config)


def test_lr_flag_scales_all_parameter_groups():
    """--lr scales all groups; LeRobot's own option only those without their own rate."""
    config, policy = make_act()

    def rates(*flags):
        settings = recipe(config, *flags)
        return [settings.peak * group["lr_scale"] for group in settings.build(policy).param_groups]

    assert rates() == pytest.approx([1e-5, 2e-6])
    assert rates("--lr=1e-3") == pytest.approx([1e-3, 2e-4])
    assert rates("--optimizer.lr=1e-3") == pytest.approx([1e-3, 2e-6])
    single_group = ["--use_policy_training_preset=false", "--optimizer.type=adamw", "--warmup_frac=0"]
    assert rates(*single_group) == pytest.approx([1e-3])
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_("backbone" in name)
    (group,) = recipe(config).build(policy).param_groups
    assert group["fused"] and {id(p) for p in group["params"]} == {id(p) for p in policy.model.backbone.parameters()}
    policy.get_optim_params = lambda: [policy.model.action_head.weight]
    with pytest.raises(ValueError, match="leaves out .* that train, e.g. model.backbone"):
        recipe(config).build(policy)


@pytest.mark.parametrize("own_groups", ["true", "false"])
def test_every_optimizer_accepts_every_policy_parameter_form(own_groups):
    """X-VLA's parameters come by name, as its own optimizer requires."""
    config, policy = make_act()
    preset, by_name = policy.get_optim_params, lambda: dict(policy.named_parameters())
    for kind, groups in itertools.product(["adam", "adamw", "xvla-adamw", "sgd", "muon"], [preset, by_name]):
        flags = [f"--use_policy_training_preset={own_groups}", f"--optimizer.type={kind}", "--warmup_frac=0"]
        policy.get_optim_params = groups
        built = recipe(config, *flags).build(policy)
        actual = {parameter for group in built.param_groups for parameter in group["params"]}
        assert actual == set(policy.parameters()), kind


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("optimizer.type=lion", "--optimizer.type=lion: expected one of adam, adamw"),
        ("optimizer.type=multi_adam", "several optimizers .multi_adam.*; give --optimizer.type adam or"),
        ("optimizer.type=muon --scaling.strategy=fsdp2", "shards are updated by Adam alone; give --scaling"),
        ("optimizer.beta=1", "--optimizer.beta: no option of AdamWConfig; did you mean --optimizer.betas"),
        ("optimizer.eps=small", "--optimizer.eps=small: "),
        ("optimizer.lr=0", "--optimizer.lr=0.0: must be positive"),
        ("optimizer.betas=[1.5,0.9]", "--optimizer.. of adamw: Invalid beta parameter at index 0: 1.5"),
        ("optimizer.type=xvla-adamw --optimizer.eps=nan", "of xvla-adamw: Invalid epsilon value: nan"),
        ("optimizer.type=sgd --optimizer.momentum=nan", "of sgd: expected finite numbers, found {'momentum': nan}"),
        ("optimizer.type=muon --optimizer.momentum=-1", "of muon: "),
        ("optimizer.type=sgd --optimizer.dampening=0.5", "--optimizer.dampening=0.5 is not supported"),
        ("scheduler.num_warmup_steps=3", "the policy has no scheduler of its own; give --scheduler.type too"),
        ("scheduler.type=cosine_decay_with_warmup", "needs more of its options num_warmup_steps, num_decay_steps"),
    ],
)
def test_invalid_optimizer_options_are_refused(flag, message):
    with pytest.raises(ValueError, match=message):
        recipe(ACTConfig(device="cpu"), *(f"--{part.removeprefix('--')}" for part in flag.split()))


def torch_optimizers(kind, policy):
    """Make torch's own optimizers over the same parameters, Muon's without this project's choice of kernels."""
    parameters = dict(policy.named_parameters())
    if kind == "sgd":
        return [torch.optim.SGD(parameters.values(), lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1)]
    layers = {
        name: p for name, p in parameters.items() if p.ndim == 2 and any(part.isdigit() for part in name.split("."))
    }
    assert 4 < len(layers) < len(parameters)
    rest = [p for name, p in parameters.items() if name not in layers]
    return [
        torch.optim.Muon(layers.values(), lr=1e-2, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01),
    ]


KINDS = {"sgd": ("momentum=0.9", "nesterov=true", "weight_decay=0.1"), "muon": ("weight_decay=0.01",)}


@pytest.mark.parametrize("kind", KINDS)
def test_sgd_and_muon_equal_torch_skip_bad_steps_and_resume(kind):
    policy = make_policy(1)
    flags = ["--use_policy_training_preset=false", f"--optimizer.type={kind}", "--scheduler.type=constant_with_warmup"]
    flags += ["--scheduler.num_warmup_steps=0", "--optimizer.lr=1e-2", "--optimizer.grad_clip_norm=0"]
    settings = recipe(policy.config, *flags, *(f"--optimizer.{option}" for option in KINDS[kind]))
    plain = copy.deepcopy(policy)
    references = torch_optimizers(kind, plain)

    def take(policy):
        return take_optimizer(
            policy, settings.build(policy), schedule=settings.schedule(9), clip_norm=settings.clip_norm
        )

    def gradients(step, factor=1.0):
        generator = torch.Generator().manual_seed(step)
        return [torch.randn(p.shape, generator=generator) * factor for p in policy.parameters()]

    optimizer = take(policy)
    for step, bad in enumerate((True, False, True, False)):
        if step == 2:  # resumes from the saved state
            saved = {name: value.clone() for name, value in optimizer.state().items()}
            policy.load_state_dict(copy.deepcopy(policy.state_dict()))
            optimizer = take(policy)
            for name, value in optimizer.state().items():
                value.copy_(saved[name])
        before = {name: value.clone() for name, value in {**optimizer.named(), **optimizer.state()}.items()}
        for p, reference, grad in zip(policy.parameters(), plain.parameters(), gradients(step), strict=True):
            p.grad, reference.grad = grad.clone(), grad.clone()
        if bad:
            next(iter(policy.parameters())).grad.view(-1)[0] = float("nan")
        _, skipped = optimizer.step(step)
        assert bool(skipped) is bad
        after = {**optimizer.named(), **optimizer.state()}
        if bad:
            assert all(torch.equal(before[name], after[name]) for name in before)
            continue
        for reference in references:
            reference.step()
        for (name, p), reference in zip(policy.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, reference, rtol=1e-5, atol=1e-7, msg=name)
    assert any(name.startswith("momentum_buffer.") for name in saved)
    count = sum(p.numel() for p in policy.parameters())
    spec = SimpleNamespace(parameters=TrainableReport(count, count, {}), recipe=settings, ema=EmaOptions())
    planned = PolicySpec.checkpoint_bytes.fget(spec)
    written = sum(tensor.nbytes for tensor in (*policy.parameters(), *saved.values()))
    assert planned == written if kind == "sgd" else planned >= written * 0.999  # without counters of steps


def test_muon_state_without_momentum_exists_before_first_step():
    policy = make_policy(1)
    flags = ["--use_policy_training_preset=false", "--optimizer.type=muon", "--optimizer.momentum=0", "--warmup_frac=0"]
    settings = recipe(policy.config, *flags)
    optimizer = take_optimizer(policy, settings.build(policy), schedule=settings.schedule(9), clip_norm=1.0)
    names = set(optimizer.state())
    policy = copy.deepcopy(policy)
    optimizer = take_optimizer(policy, settings.build(policy), schedule=settings.schedule(9), clip_norm=1.0)
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(0)
    assert set(optimizer.state()) == names


@pytest.mark.parametrize("trained", ["layers.0", "head", ""])
def test_muon_checkpoint_state_kinds_are_known(trained):
    config, policy = make_act()
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(trained in name and (trained != "layers.0" or parameter.ndim == 2))
    settings = recipe(
        config, "--optimizer.type=muon", "--scheduler.type=constant_with_warmup", "--scheduler.num_warmup_steps=0"
    )
    state = take_optimizer(policy, settings.build(policy), schedule=settings.schedule(9), clip_norm=1.0).state()
    assert {name.partition(".")[0] for name in state} in settings.state_kinds
