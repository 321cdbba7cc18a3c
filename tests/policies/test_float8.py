"""Linear layers that multiply in float8: what is computed, which they are, and what of a run changes."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

from tests import in_process
from tests.tiny import make_batch, make_config, make_policy
from vla_finetuning import checks
from vla_finetuning.flags import parse_args
from vla_finetuning.policies import float8
from vla_finetuning.policies.compiling import Compiler
from vla_finetuning.policies.float8 import check_device, multiply_in_float8
from vla_finetuning.policies.pi05 import PI05, PI05Loss
from vla_finetuning.policies.trainable import choose_trainable
from vla_finetuning.training.memory import step_memory

linear = pytest.importorskip("torchao.float8.float8_linear", reason="torchao is installed by make torchao")
CPU = torch.device("cpu")
# Every finite number of the format, and the largest.
NUMBERS = np.unique(torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().numpy())
NUMBERS = NUMBERS[np.isfinite(NUMBERS)].astype(np.float64)
LARGEST = 448.0


def rounded(factor):
    """Each row scaled by a power of two, rounded to the nearest number of the format, and scaled back; by numpy."""
    factor = factor.astype(np.float64)
    scale = 2.0 ** np.floor(np.log2(LARGEST / np.abs(factor).max(axis=1, keepdims=True)))
    scaled = factor * scale
    above = np.clip(np.searchsorted(NUMBERS, scaled), 1, len(NUMBERS) - 1)
    low, high = NUMBERS[above - 1], NUMBERS[above]
    return np.where(scaled - low < high - scaled, low, high) / scale


def test_products_and_their_gradients_are_those_of_rounded_factors():
    generator = torch.Generator().manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 48))
    weight, bias = layers[0].weight.detach().numpy(), layers[0].bias.detach().numpy()
    assert multiply_in_float8([layers], "all", emulate=True) == 1
    hidden = torch.randn(5, 32, generator=generator, requires_grad=True)
    gradient = torch.randn(5, 48, generator=generator)
    result = layers(hidden)
    result.backward(gradient)
    x, g = hidden.detach().numpy(), gradient.numpy()
    np.testing.assert_allclose(result.detach(), rounded(x) @ rounded(weight).T + bias, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(hidden.grad, rounded(g) @ rounded(weight.T).T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(layers[0].weight.grad, rounded(g.T) @ rounded(x.T).T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(layers[0].bias.grad, g.sum(axis=0), rtol=1e-5)
    # And the factors are not what they were.
    assert np.abs(result.detach().numpy() - (x @ weight.T + bias)).max() > 1e-3


def loss_of(which, mode="full", **options):
    policy = make_policy(2, head_dim=16)
    choose_trainable(policy, mode)
    loss = PI05Loss(policy, attention="sdpa", **options)
    return loss, multiply_in_float8(loss.layers(), which, emulate=True)


def in_eight_bits(loss):
    return {name for name, module in loss.policy.named_modules() if isinstance(module, linear.Float8Linear)}


def test_which_layers_multiply_so():
    whole, many = loss_of("all")
    found = in_eight_bits(whole)
    assert len(found) == many
    every = {name for name, module in whole.policy.named_modules() if isinstance(module, nn.Linear)}
    # What is not: projections of actions and time, language heads, images' projector, norms, and the last layer of the
    # language model, of which keys and values alone are computed.
    left = {name.rpartition(".")[2] for name in every - found if ".language_model.layers.2." not in name}
    assert left == {*PI05.heads, "lm_head", "linear", "dense"}
    frozen, _ = loss_of("frozen", "expert")
    assert in_eight_bits(frozen) == {name for name in found if "gemma_expert" not in name}
    assert in_eight_bits(loss_of("off")[0]) == set()
    assert loss_of("all")[0].policy.state_dict().keys() == make_policy(2, head_dim=16).state_dict().keys()


def gradients(loss, inputs):
    result = loss(*inputs)
    result.backward()
    found = torch.cat([p.grad.flatten() for p in loss.policy.parameters() if p.grad is not None])
    return result.item(), found


@pytest.mark.parametrize("options", [{}, {"checkpointing": True}, {"compile": Compiler("aot_eager")}])
def test_the_loss_and_its_gradients_differ_by_the_rounding_alone(options):
    plain, _ = loss_of("off")
    loss, _ = loss_of("all", **options)
    inputs = make_batch(plain.policy)
    (expected, of_plain), (found, of_rounded) = gradients(plain, inputs), gradients(loss, inputs)
    assert found != expected and found == pytest.approx(expected, rel=0.02)
    assert 0.9 < torch.cosine_similarity(of_rounded, of_plain, dim=0) < 0.9999
    if options:
        again, of_eager = gradients(loss_of("all")[0], inputs)
        assert found == pytest.approx(again, rel=1e-6)
        torch.testing.assert_close(of_rounded, of_eager, rtol=1e-4, atol=1e-6)
    if compiler := options.get("compile"):
        assert compiler.calls and not compiler.failed


def test_a_run_multiplies_as_it_is_asked_to(tmp_path):
    setting = in_process.make_setting(tmp_path)
    runs = [in_process.resolved(setting, **{"train.fp8": which}) for which in ("off", "all", "all")]
    plain, rounded_once, again = [in_process.train(run).named() for run in runs]
    assert all(torch.equal(rounded_once[name], again[name]) for name in again)
    assert any(not torch.equal(plain[name], again[name]) for name in again)
    for name, value in plain.items():
        torch.testing.assert_close(again[name], value, rtol=0, atol=2e-4)  # three steps at a rate of 2.5e-5


def test_a_plain_run_does_without_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    assert loss_of("off")[1] == 0
    with pytest.raises(ImportError):
        loss_of("all")


def planned(which, **options):
    return step_memory(
        make_config(2, width=64, mlp_dim=256, head_dim=16),
        "full",
        cameras=2,
        batch_size=4,
        grad_accum=1,
        draws=1,
        bf16=True,
        attention="sdpa",
        checkpointing=False,
        fp8=which,
        **options,
    )


@pytest.mark.parametrize("options", [{}, {"strategy": "fsdp2", "workers": 2}])
def test_the_plan_of_memory_counts_them(options):
    plain, memory = planned("off", **options), planned("all", **options)
    assert (memory.weights, memory.gradients, memory.optimizer) == (plain.weights, plain.gradients, plain.optimizer)
    assert memory.peak != plain.peak


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train.fp8=frozen", "--train.mode=full"], "nothing is frozen; give --train.fp8=all"),
        (["--train.fp8=all", "--peft.r=4"], "--train.fp8=all with --peft: adapters multiply in full precision"),
    ],
)
def test_what_does_not_go_together_is_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        parse_args(["--policy.path=p", "--dataset.root=d", "--output_dir=o", *flags])


def test_where_torchao_is_missing_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--train.fp8=all needs torchao: run `make torchao`"):
        parse_args(["--policy.path=p", "--dataset.root=d", "--output_dir=o", "--train.fp8=all"])


def test_gpus_that_cannot_are_refused(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ValueError, match=r"A100 has compute capability 8.0, and products in float8 need 8.9"):
        check_device(gpu, torch.bfloat16)
    with pytest.raises(ValueError, match="leave out --train.precision=fp32"):
        check_device(gpu, None)
    check_device(CPU, None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: float8.MIN_CAPABILITY)
    check_device(gpu, torch.bfloat16)
