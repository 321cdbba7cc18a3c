"""Detection and replacement of faulty attention kernels, with faults seen in real kernels."""

import logging

import pytest
import torch

from tests.tiny import make_batch, make_policy
from vla_finetuning.policies import attention
from vla_finetuning.policies.attention import choose_kernel
from vla_finetuning.policies.compiling import Compiler
from vla_finetuning.policies.families.pi05 import PI05Loss
from vla_finetuning.policies.trainable import choose_trainable

CPU = torch.device("cpu")
FUSED = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def loss():
    policy = make_policy(2)
    choose_trainable(policy, "full")
    return PI05Loss(policy, attention="sdpa")


def chosen(loss, dtype=torch.float32, requested="sdpa"):
    return choose_kernel(requested, loss.attentions(2, [20, 60]), CPU, dtype)


def by_flash():
    return torch.backends.cuda.flash_sdp_enabled()


class InBackward(torch.autograd.Function):
    """Apply the identity and change its gradient."""

    @staticmethod
    def forward(context, tensor, change):
        context.change = change
        return tensor.clone()

    @staticmethod
    def backward(context, gradient):
        return context.change(gradient), None


def wrong_at_one_query(query, key, value, bias, scale):
    at_query = torch.arange(query.shape[2]) == 5
    return FUSED(query, key, value, bias, scale=scale) * torch.where(at_query, 1.5, 1.0)[:, None]


def not_a_number_in_the_result(query, key, value, bias, scale):
    at_query = torch.arange(query.shape[2]) == 1
    return FUSED(query, key, value, bias, scale=scale) * torch.where(at_query, torch.nan, 1.0)[:, None]


def not_a_number_below_the_smallest_exponential(query, key, value, bias, scale):
    """Return NaN gradients of queries whose scores are all far below zero, as cuDNN does."""
    low = (query @ key.transpose(2, 3) * scale + bias).logsumexp(dim=-1) < -88.7
    query = InBackward.apply(query, lambda gradient: gradient.masked_fill(low[..., None], torch.nan))
    return FUSED(query, key, value, bias, scale=scale)


def wrong_gradient_of_the_padding(query, key, value, bias, scale):
    """Ignore the mask in backward, so that padding gets a gradient."""
    padded = (bias < 0).transpose(2, 3)
    key = InBackward.apply(key, lambda gradient: gradient + 0.1 * gradient.std() * padded)
    return FUSED(query, key, value, bias, scale=scale)


def wrong_gradient_of_the_values(query, key, value, bias, scale):
    return FUSED(query, key, InBackward.apply(value, lambda gradient: 1.2 * gradient), bias, scale=scale)


WRONG = {
    "result": (wrong_at_one_query, not_a_number_in_the_result),
    "gradient of the queries": (not_a_number_below_the_smallest_exponential,),
    "gradient of the keys": (wrong_gradient_of_the_padding,),
    "gradient of the values": (wrong_gradient_of_the_values,),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_correct_attention_kernel_is_chosen(loss, dtype, caplog):
    actual = chosen(loss, dtype)
    assert (actual.kernel, actual.refused, caplog.records) == ("sdpa", [], [])
    shapes = ["prefix 28 x 28", "suffix 6 x 34", "prefix 68 x 68", "suffix 6 x 74"]
    assert actual.backends == dict.fromkeys(shapes, "FLASH_ATTENTION")


@pytest.mark.parametrize(
    "part, wrong, dtype",
    [(part, kernel, torch.float32) for part, kernels in WRONG.items() for kernel in kernels]
    + [("gradient of the keys", wrong_gradient_of_the_padding, torch.bfloat16)],
)
def test_faulty_attention_kernel_is_replaced(loss, monkeypatch, caplog, dtype, part, wrong):
    def fused(query, key, value, bias, scale):
        return (wrong if by_flash() else FUSED)(query, key, value, bias, scale=scale)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", fused)
    actual = chosen(loss, dtype)
    assert actual.kernel == "math"
    (reason,) = actual.refused
    assert reason.startswith(f"FLASH_ATTENTION computes a wrong {part} at prefix 28 x 28 ({dtype}")
    assert [record.getMessage() for record in caplog.records] == [
        f"attention: {reason}; the run uses 'math' in its place"
    ]


def test_kernel_faulty_at_one_shape_is_not_used_at_any(loss, monkeypatch):
    def fused(query, key, value, bias, scale):
        wrong = by_flash() and key.shape[2] == 74
        return (wrong_gradient_of_the_values if wrong else FUSED)(query, key, value, bias, scale=scale)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", fused)
    actual = chosen(loss)
    assert actual.kernel == "math" and "at suffix 6 x 74" in actual.refused[0]


def test_eager_attention_is_used_if_all_kernels_are_faulty(loss, monkeypatch, caplog):
    monkeypatch.setattr(
        attention.F, "scaled_dot_product_attention", lambda *a, scale: wrong_gradient_of_the_values(*a, scale=scale)
    )
    with caplog.at_level(logging.WARNING):
        actual = chosen(loss)
    assert actual.kernel == "eager" and set(actual.backends.values()) == {"eager"}
    assert [reason.split()[0] for reason in actual.refused] == ["FLASH_ATTENTION", "MATH"] and len(caplog.records) == 2


def test_kernel_check_skips_gradients_of_frozen_layers(monkeypatch):
    policy = make_policy(2)
    choose_trainable(policy, "expert")
    backward = {shape.name: shape.backward for _, shape in PI05Loss(policy).attentions(2, [20])}
    assert backward == {"prefix": False, "suffix": True}
    computed = []

    def fused(query, key, value, bias, scale):
        computed.append((key.shape[2], key.requires_grad))
        return FUSED(query, key, value, bias, scale=scale)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", fused)
    assert chosen(PI05Loss(policy)).kernel == "sdpa"
    assert set(computed) == {(28, False), (34, True), (68, False), (74, True)}


def test_out_of_memory_in_kernel_check_is_raised(loss, monkeypatch):
    def fused(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", fused)
    with pytest.raises(torch.OutOfMemoryError):
        chosen(loss)


def test_eager_attention_is_not_checked(loss, monkeypatch):
    monkeypatch.setattr(attention, "_compute", lambda *_: pytest.fail("it was computed"))
    assert chosen(loss, requested="eager").kernel == "eager"


@pytest.mark.parametrize("compiler", [None, Compiler("eager")])
def test_loss_uses_chosen_kernel(loss, monkeypatch, compiler):
    expected = loss(*make_batch(loss.policy))
    used = []

    def fused(*args, **options):
        if len(args) > 3:  # not the vision tower, which has no mask
            used.append(by_flash())
        return FUSED(*args, **options)

    pinned = PI05Loss(loss.policy, attention="math", compile=compiler)
    if compiler is None:
        monkeypatch.setattr(attention.F, "scaled_dot_product_attention", fused)
    assert pinned(*make_batch(loss.policy)).item() == pytest.approx(expected.item(), rel=1e-6)
    assert not any(used) and bool(used) == (compiler is None)
    assert by_flash()
