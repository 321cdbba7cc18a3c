"""Trainable parameters by mode, and their dtypes, against PI0.5's own parameters."""

import pytest
import torch
from lerobot.policies.pi05.modeling_pi05 import PI05Policy

from tests.tiny import make_batch, make_policy, real_config
from vla_finetuning.policies.families.pi05 import PI05Loss
from vla_finetuning.policies.meta import meta_policy
from vla_finetuning.policies.trainable import cast_frozen, choose_trainable

MODES = ("heads", "expert", "full")


@pytest.mark.parametrize("mode", MODES)
def test_every_trainable_parameter_gets_gradient(mode):
    policy = make_policy(2)
    report = choose_trainable(policy, mode)
    PI05Loss(policy)(*make_batch(policy)).backward()
    for name, parameter in policy.named_parameters():
        assert (parameter.grad is not None) is parameter.requires_grad, name
        # A gradient of zeros would hide a parameter that is not used after all.
        assert parameter.grad is None or parameter.grad.abs().sum() > 0, name
    counted = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    assert report.trainable == counted > 0
    assert report.total == counted + sum(report.frozen.values())


def test_parameter_counts_of_real_pi05_by_mode():
    policy = meta_policy(real_config())
    assert type(policy) is PI05Policy
    reports = {mode: choose_trainable(policy, mode) for mode in MODES}
    assert {mode: report.trainable for mode, report in reports.items()} == {
        "heads": 2_165_792,
        "expert": 430_098_464,
        "full": 3_244_377_872,
    }
    assert reports["full"].total == 4_143_404_816
    assert reports["full"].frozen == {"unused in training": 899_026_944}
    # Not tied to the word embedding, which trains.
    state = dict(policy.named_parameters())
    paligemma = "model.paligemma_with_expert.paligemma"
    assert not state[f"{paligemma}.lm_head.weight"].requires_grad
    assert state[f"{paligemma}.model.language_model.embed_tokens.weight"].requires_grad


def test_cast_frozen_leaves_trained_norm_and_patch_weights():
    policy = make_policy(2)
    choose_trainable(policy, "expert")
    batch, noise, time = make_batch(policy)
    expected = PI05Loss(policy)(batch, noise, time).item()
    images = 2 * torch.rand((3, 3, 28, 28), generator=torch.Generator().manual_seed(0)) - 1
    embed = torch.no_grad()(torch.autocast("cpu", torch.bfloat16)(policy.model.paligemma_with_expert.embed_image))
    features = embed(images)
    cast_frozen(policy, torch.bfloat16)
    assert torch.equal(embed(images), features)
    for name, parameter in policy.named_parameters():
        frozen_matrix = not parameter.requires_grad and "norm" not in name and "vision_model.embeddings" not in name
        assert parameter.dtype == (torch.bfloat16 if frozen_matrix else torch.float32), name
    with torch.autocast("cpu", torch.bfloat16):
        loss = PI05Loss(policy)(batch, noise, time)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected, rel=0.03)
    assert {p.grad.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
