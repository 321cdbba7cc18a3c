"""LoRA adapters against plain PEFT on LeRobot's policy: loss, gradients, checkpoints and exports."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.datasets import LeRobotDatasetMetadata
from lerobot.policies.factory import make_policy as lerobots_policy
from safetensors.torch import load_file, save_file

from diagnostics import merge_adapter
from tests import in_process
from tests.run.test_checkpoint import save_tensors
from tests.tiny import make_batch, make_policy, reference
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.options.peft import PeftOptions
from vla_finetuning.plan.describe import describe
from vla_finetuning.policies.families.pi05 import PI05Loss
from vla_finetuning.policies.lora import add_adapters
from vla_finetuning.policies.saving import save_adapters
from vla_finetuning.policies.trainable import UNUSED, choose_trainable
from vla_finetuning.run.checkpoint import OPTIMIZER, TRAINABLE
from vla_finetuning.training.capacity import planned_memory
from vla_finetuning.training.export import export, exported_checkpoint
from vla_finetuning.training.model import build_model

CPU = torch.device("cpu")
EVERYWHERE = r".*(language_model|gemma_expert).*\.(q_proj|v_proj|up_proj)"


def adapted_policy(**options):
    """Make a tiny PI0.5 with non-zero adapters, and a copy of equal weights wrapped by LeRobot."""
    policy = make_policy()
    policy.config.pretrained_path = "somewhere"
    plain = copy.deepcopy(policy)
    arguments = {"method_type": "lora", "r": 4, **options}
    report = choose_trainable(policy, "heads", PeftOptions(**arguments))
    wrapped = plain.wrap_with_peft(peft_cli_overrides=arguments)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    plain.load_state_dict(policy.state_dict())
    return policy, wrapped, plain, report


@pytest.mark.parametrize(
    ("options", "prefix_trains"),
    [
        ({}, False),
        ({"target_modules": EVERYWHERE, "full_training_modules": ["action_out_proj"], "lora_alpha": 32}, True),
    ],
    ids=["in the expert", "everywhere"],
)
def test_adapter_loss_and_gradients_equal_peft(options, prefix_trains, monkeypatch):
    policy, wrapped, plain, report = adapted_policy(**options)
    batch, noise, time = make_batch(policy)
    with_draws = reference(plain, noise, time)
    expected, _ = with_draws.forward(batch)
    expected.backward()

    enabled = []
    run_prefix = PI05Loss._run_prefix
    record_grad_mode = lambda loss, batch: enabled.append(torch.is_grad_enabled()) or run_prefix(loss, batch)  # noqa: E731
    monkeypatch.setattr(PI05Loss, "_run_prefix", record_grad_mode)
    loss = PI05Loss(policy)(batch, noise, time)
    loss.backward()
    assert enabled == [prefix_trains]
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    theirs = dict(with_draws.named_parameters())
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    assert report.trainable == sum(p.numel() for p in trained.values())
    for name, parameter in trained.items():
        assert "lora_" in name or "action_out_proj.modules_to_save" in name
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-6, msg=name)
        assert parameter.grad.abs().max() > 0
    # Adapters of layers unused in training do not train: the last layer, except keys and values.
    idle = {n for n, p in wrapped.get_base_model().named_parameters() if p.requires_grad} - trained.keys()
    assert bool(idle) == prefix_trains and report.frozen[UNUSED] > 0
    assert all(theirs[name].grad is None or not theirs[name].grad.any() for name in idle)


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return in_process.make_setting(tmp_path_factory.mktemp("lora"))


def planned(run):
    return planned_memory(run.policy, run.rows.frames)(run.config)


def resolved(setting, **changes):
    options = {"peft.method_type": "lora", "peft.r": 4, "peft.export": "adapter", "lr": 1e-2, **changes}
    return in_process.resolved(setting, **options)


def test_run_trains_checkpoints_and_exports_adapters(setting):
    run = resolved(setting, output_dir=setting[0] / "adapters")
    assert "LoRA of rank 4, alpha 8, in the policy type's own choice of layers" in describe(run)
    first, second = (build_model(run.policy, CPU)[0].state_dict() for _ in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())  # drawn from the run's seed

    trained = in_process.train(run)
    assert all(".lora_" in name for name in trained.named()) and len(trained.names) > 4
    parameters = run.policy.parameters
    assert parameters.trainable == sum(p.numel() for p in trained.params) < 0.05 * parameters.total
    folder = run.job.checkpoints_dir / f"step_{run.job.steps:08d}"
    tensors = {TRAINABLE: trained.named(), OPTIMIZER: trained.state()}
    save_tensors(folder, tensors, replace(run.job.start, step=run.job.steps))
    assert load_file(folder / "attempt-00000" / "trainable.safetensors").keys() == trained.named().keys()

    files = {"environment.json": {"drawn": {"render": "egl"}}, **run.robots[0].files}
    spec = run.policy.select_robot(replace(run.robots[0], files=files))
    export(spec, exported_checkpoint(run.job, False), run.job.output_dir)
    outputs = {}
    meta = LeRobotDatasetMetadata("local/test", root=setting[1])
    for name in ("pretrained_model", "adapter"):
        config = PreTrainedConfig.from_pretrained(run.job.output_dir / name, cli_overrides=["--device=cpu"])
        assert config.use_peft == (name == "adapter")
        config.pretrained_path = run.job.output_dir / name
        policy = lerobots_policy(cfg=config, ds_meta=meta).eval()
        batch, noise, _ = make_batch(policy, 2)
        with torch.no_grad():
            outputs[name] = policy.predict_action_chunk(batch, noise=noise)
    torch.testing.assert_close(outputs["adapter"], outputs["pretrained_model"], rtol=1e-4, atol=1e-5)
    adapter = json.loads((run.job.output_dir / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(setting[2]) and adapter["r"] == 4
    folders = setting[2], run.job.output_dir / "pretrained_model"
    base, merged = (load_file(path / "model.safetensors") for path in folders)
    assert base.keys() == merged.keys()
    tool = run.job.output_dir / "merged"
    (run.job.output_dir / "adapter" / "action_tokenizer").mkdir()  # as with knowledge insulation
    (run.job.output_dir / "adapter" / "action_tokenizer" / "tokenizer.json").write_text("{}")
    assert merge_adapter.main([str(run.job.output_dir / "adapter"), str(tool)]) == 0
    assert merge_adapter.main([str(run.job.output_dir / "adapter"), str(tool)]) == 2  # the folder exists
    by_tool = load_file(tool / "model.safetensors")
    assert by_tool.keys() == merged.keys()
    for name, value in merged.items():
        torch.testing.assert_close(by_tool[name], value, rtol=1e-5, atol=1e-6, msg=name)
    assert json.loads((tool / "config.json").read_text())["use_peft"] is False
    assert (tool / "action_tokenizer" / "tokenizer.json").read_text() == "{}"
    for name in ("robot.json", "environment.json"):
        assert (tool / name).read_text() == (run.job.output_dir / "pretrained_model" / name).read_text()
    assert json.loads((tool / "environment.json").read_text()) == {"drawn": {"render": "egl"}}
    in_process.resolved(setting, **{"policy.path": tool})  # training can continue from it
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {name.split(".lora_")[0] + ".weight" for name in trained.named()}


def test_merge_refuses_adapters_of_other_layers(setting, tmp_path, capsys):
    run = resolved(setting, output_dir=tmp_path / "run")
    policy = run.policy.start()
    adapted = add_adapters(policy, run.policy.adapters)
    save_adapters(adapted, str(setting[2]), None, *run.policy.processors(), tmp_path / "adapter", policy.config)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name.replace("q_proj", "query"): tensor for name, tensor in load_file(path).items()}, path)
    assert merge_adapter.main([str(tmp_path / "adapter"), str(tmp_path / "merged")]) == 2
    assert f"{path} is of other layers than {setting[2]} has" in capsys.readouterr().err
    save_file({name.replace("query", "q_proj"): tensor[:1].clone() for name, tensor in load_file(path).items()}, path)
    assert merge_adapter.main([str(tmp_path / "adapter"), str(tmp_path / "merged")]) == 2
    assert "size mismatch" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


def test_planned_memory_and_flops_count_adapters(setting):
    """Count a weight, a gradient and Adam's two moments per number, and a step per parameter."""
    run = resolved(setting)
    full_run = in_process.resolved(setting)
    adapters, full = planned(run), planned(full_run)
    assert adapters.gradients == 4 * run.policy.parameters.trainable
    assert 0 <= adapters.optimizer - 8 * run.policy.parameters.trainable < 1024
    assert adapters.needed < full.needed
    flops, full_flops = (planned_run.policy.flops_by_prompt[run.policy.prompts[0]] for planned_run in (run, full_run))
    assert flops < full_flops


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"peft.target_modules": "no_such_layer"}, "--peft.target_modules=no_such_layer .*not found"),
        ({"peft.method_type": "miss"}, "--peft.method_type=miss: expected lora"),
        ({"peft.init_type": "pissa"}, "--peft.init_type=pissa: expected one of gaussian"),
        ({"peft.export": "both"}, "--peft.export=both: expected one of merged, adapter"),
        ({"peft.r": 0}, "--peft.r=0: expected a whole number, at least 1"),
    ],
)
def test_invalid_peft_options_are_refused(setting, flags, message):
    with pytest.raises(ValueError, match=message):
        resolved(setting, **flags)


def test_any_peft_option_enables_lora():
    arguments = ["--dataset.root=/d", "--output_dir=/o", "--policy.path=/p"]
    adapters = parse_args([*arguments, '--peft.target_modules=["q_proj", "v_proj"]']).peft
    assert adapters.method_type == "lora" and adapters.target_modules == ["q_proj", "v_proj"]
    assert not parse_args(arguments).peft.enabled
    with pytest.raises(ValueError, match="--policy.type=act with --peft.method_type=lora: .*start from a pretrained"):
        parse_args([*arguments[:2], "--policy.type=act", "--peft.r=8"])
