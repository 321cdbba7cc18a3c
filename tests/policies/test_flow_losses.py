"""The losses of PI0.5, PI0 and SmolVLA against LeRobot's own forward and plain autograd."""

import pytest
import torch

from tests.policies.flow_policies import (
    KINDS,
    ROWS,
    assert_equal_gradients,
    gradients,
    joint_error,
    lerobots,
    make_batch,
    make_loss,
    make_policy,
    to_float64,
)
from vla_finetuning.columns import ACTION_DIMS, IS_PRESENT
from vla_finetuning.policies.attention import Shape, find_fault
from vla_finetuning.policies.compiling import Compiler
from vla_finetuning.policies.trainable import choose_trainable, remove_unused

FUSED = torch.nn.functional.scaled_dot_product_attention
# Options of SmolVLA that change the order or the number of tokens and layers.
MARKS = {"add_image_special_tokens": True, "empty_cameras": 1, "prefix_length": 64}
FEWER_LAYERS = {"attention_mode": "self_attn", "num_expert_layers": 2}
CROSS_ALONE = {"self_attn_every_n_layers": 0}
VISION_TRAINS = {"freeze_vision_encoder": False, "train_state_proj": False}


@pytest.mark.parametrize(
    ("kind", "mode", "attention", "missing", "options"),
    [
        ("pi05", "heads", "sdpa", None, {}),
        ("pi05", "expert", "eager", None, {}),
        ("pi05", "full", "eager", 1, {"cameras": 3}),
        ("pi05", "full", "sdpa", None, {"cameras": 1}),
        ("pi0", "expert", "sdpa", 1, {}),
        ("pi0", "full", "eager", None, {"cameras": 1}),
        ("smolvla", "heads", "sdpa", None, CROSS_ALONE),
        ("smolvla", "full", "sdpa", 1, FEWER_LAYERS),
        ("smolvla", "full", "eager", None, {"resize_imgs_with_padding": (16, 16)}),
        ("smolvla", "full", "eager", None, VISION_TRAINS),
        ("smolvla", "full", "sdpa", 0, MARKS),
    ],
)
def test_loss_and_gradients_equal_lerobot(backbone, kind, mode, attention, missing, options, in_float64):
    policy = make_policy(kind, backbone, **options).double()
    arguments = to_float64(*make_batch(policy, missing=missing))
    choose_trainable(policy, mode)
    expected, wanted = lerobots(policy, *arguments)
    loss = make_loss(policy, attention=attention)(*arguments)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-14)
    assert_equal_gradients(gradients(policy), wanted)


@pytest.mark.parametrize(
    ("kind", "mode", "options", "of_loss"),
    [
        ("pi05", "expert", {"depth": 1}, {"attention": "eager"}),
        ("pi05", "full", {}, {}),
        ("pi0", "full", {}, {}),
        ("smolvla", "heads", {}, {"checkpointing": True}),
        ("smolvla", "full", {}, {"compile": Compiler("eager")}),
    ],
)
def test_float32_loss_without_unused_parameters_equals_lerobot(backbone, kind, mode, options, of_loss):
    policy = make_policy(kind, backbone, **options)
    arguments = make_batch(policy)
    choose_trainable(policy, mode)
    expected, wanted = lerobots(policy, *arguments)
    left_off = remove_unused(policy)
    assert left_off and not set(left_off) & dict(policy.named_parameters()).keys()
    loss = make_loss(policy, **{"attention": "sdpa", **of_loss})(*arguments)
    loss.backward()
    assert loss.shape == () and loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert joint_error(gradients(policy), wanted) <= 2e-6
    assert "compile" not in of_loss or of_loss["compile"].calls


@pytest.mark.parametrize("kind", KINDS)
def test_loss_of_several_draws_is_mean_of_lerobot_losses(backbone, kind, in_float64):
    policy, draws = make_policy(kind, backbone).double(), 3
    choose_trainable(policy, "full")
    batch, noise, time = to_float64(*make_batch(policy, draws=draws))
    each = [lerobots(policy, batch, noise[draw::draws], time[draw::draws]) for draw in range(draws)]
    loss = make_loss(policy)(batch, noise, time)
    loss.backward()
    assert loss.item() == pytest.approx(sum(expected.item() for expected, _ in each) / draws, rel=1e-13)
    wanted = {name: sum(actual[name] for _, actual in each) / draws for name in each[0][1]}
    assert_equal_gradients(gradients(policy), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_row_losses_equal_lerobot(backbone, kind):
    policy = make_policy(kind, backbone)
    batch, noise, time = make_batch(policy)
    expected, _ = lerobots(policy, batch, noise, time, "none")
    loss, weight = make_loss(policy), torch.tensor([0.5, 2.0, 0.1])
    torch.testing.assert_close(loss(batch, noise, time, per_row=True), expected)
    torch.testing.assert_close(loss({**batch, "row_weight": weight}, noise, time), (expected * weight).mean())


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("pi0", Shape("suffix", 6, 4, 12, 6, True, before=1)),
        ("smolvla", Shape("suffix", 5, 4, 12, 6, True, causal=True)),
    ],
)
def test_kernel_that_ignores_causal_mask_is_detected(backbone, kind, shape, monkeypatch):
    loss = make_loss(make_policy(kind, backbone))
    layer = next(layer for layer, computed in loss.attentions(2, [12]) if computed.name == "suffix")
    device = torch.device("cpu")
    assert find_fault("sdpa", [(layer, shape)], device, torch.float32) is None

    def sees_all(query, key, value, bias, **options):
        return FUSED(query, key, value, bias[:, :, -1:], **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sees_all)
    assert "wrong result" in find_fault("sdpa", [(layer, shape)], device, torch.float32)


# ---- rows of robots that differ, in one batch -----------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "options"), [*((kind, {}) for kind in KINDS), ("smolvla", MARKS)])
def test_masked_camera_equals_absent_camera(backbone, kind, options):
    policy = make_policy(kind, backbone, **options)
    batch, noise, time = make_batch(policy)
    loss, camera = make_loss(policy), "observation.images.1"
    present = torch.tensor([True, False, True])
    image = (batch[camera] * present[:, None, None, None]).requires_grad_()
    masked = {**batch, camera: image, camera + IS_PRESENT: present}
    with torch.no_grad():
        complete = loss(batch, noise, time, per_row=True)
        without = loss({key: value for key, value in batch.items() if key != camera}, noise, time, per_row=True)
    torch.testing.assert_close(
        loss(masked, noise, time, per_row=True), torch.where(present, complete, without), rtol=2e-5, atol=2e-6
    )
    assert (complete - without).abs().min() > 1e-4
    policy.requires_grad_(True)
    make_loss(policy)(masked, noise, time).backward()
    assert (image.grad.abs().sum(dim=(1, 2, 3)) > 0).tolist() == present.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_row_loss_covers_only_action_dimensions_of_its_robot(backbone, kind):
    policy = make_policy(kind, backbone)
    batch, noise, time = make_batch(policy)
    loss, outputs = make_loss(policy), policy.config.output_features
    mixed = {**batch, ACTION_DIMS: torch.arange(3) < torch.arange(ROWS, 0, -1)[:, None]}
    mixed_losses = loss(mixed, noise, time, per_row=True)
    for row, width in enumerate((3, 2, 1)):
        outputs["action"] = type(outputs["action"])(outputs["action"].type, (width,))
        alone = loss(batch, noise, time, per_row=True)
        torch.testing.assert_close(mixed_losses[row], alone[row], rtol=2e-5, atol=2e-6)
