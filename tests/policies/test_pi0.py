"""PI0's loss against LeRobot's own forward and plain autograd; PI0.5's tests have what both share."""

import copy

import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.pi0 import modeling_pi0
from lerobot.policies.pi0.configuration_pi0 import PI0Config

from tests.policies.test_pi05 import gradient_errors, gradients, relative_error, to_float64
from tests.tiny_backbones import VOCABULARY, tiny_paligemma
from vla_finetuning.policies.attention import Shape, what_is_wrong
from vla_finetuning.policies.counting import flops_per_sample
from vla_finetuning.policies.families.pi0 import PI0Loss
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.trainable import choose_trainable, leave_off_unused

CHUNK, WIDTH, STATE, ROWS = 5, 8, 4, 3
MODES = pytest.mark.parametrize("mode", ["heads", "expert", "full"])


def config_of(cameras=2, **options):
    images = {f"observation.images.{i}": PolicyFeature(FeatureType.VISUAL, (3, 28, 28)) for i in range(cameras)}
    return PI0Config(
        input_features={**images, "observation.state": PolicyFeature(FeatureType.STATE, (STATE,))},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (3,))},
        device="cpu",
        **{
            **{"chunk_size": CHUNK, "n_action_steps": CHUNK, "max_state_dim": 6, "max_action_dim": WIDTH},
            **{"image_resolution": (28, 28), "tokenizer_max_length": 12},
            **options,
        },
    )


def make_policy(cameras=2):
    """All weights random: LeRobot starts some layers at zero, where a wrong gradient hides."""
    with tiny_paligemma(modeling_pi0):
        policy = modeling_pi0.PI0Policy(config_of(cameras))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return policy


def make_batch(policy, rows=ROWS, missing=(), draws=1):
    generator = torch.Generator().manual_seed(1)
    batch = {
        key: torch.rand((rows, *feature.shape), generator=generator)
        for key, feature in policy.config.image_features.items()
        if key not in missing
    }
    batch["observation.language.tokens"] = torch.randint(0, VOCABULARY, (rows, 12), generator=generator)
    batch["observation.language.attention_mask"] = torch.arange(12)[None] < 3 * torch.arange(rows)[:, None] + 2
    batch["observation.state"] = torch.randn((rows, STATE), generator=generator)
    batch["action"] = torch.randn((rows, CHUNK, 3), generator=generator)
    noise = torch.randn((rows * draws, CHUNK, WIDTH), generator=generator)
    return batch, noise, torch.rand(rows * draws, generator=generator) * 0.998 + 0.001


def lerobots(policy, noise, time):
    policy = copy.deepcopy(policy)
    policy.model.sample_noise, policy.model.sample_time = lambda shape, device: noise, lambda rows, device: time
    return policy


@pytest.mark.parametrize(
    ("mode", "attention", "cameras", "missing"),
    [
        ("heads", "eager", 1, ()),
        ("heads", "sdpa", 2, ("observation.images.1",)),
        ("expert", "eager", 2, ()),
        ("expert", "sdpa", 1, ()),
        ("full", "eager", 2, ("observation.images.1",)),
        ("full", "sdpa", 2, ()),
    ],
)
def test_loss_and_every_gradient_are_lerobots(mode, attention, cameras, missing, in_float64):
    policy = make_policy(cameras).double()
    batch, noise, time = to_float64(*make_batch(policy, missing=missing))
    choose_trainable(policy, mode)
    theirs = lerobots(policy, noise, time)
    expected, _ = theirs.forward(batch)
    expected.backward()
    loss = PI0Loss(policy, attention=attention)(batch, noise, time)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-14)
    found, wanted = gradients(policy), gradients(theirs)
    assert found.keys() == wanted.keys() and any("state_proj" in name for name in found)
    errors = gradient_errors(found, wanted)
    assert max(errors.values()) <= 1e-12, sorted(errors.items(), key=lambda item: -item[1])[:3]


@MODES
def test_in_float32_without_what_training_never_uses(mode):
    policy = make_policy()
    arguments = make_batch(policy)
    choose_trainable(policy, mode)
    theirs = lerobots(policy, *arguments[1:])
    expected, _ = theirs.forward(arguments[0])
    expected.backward()
    leave_off_unused(policy)
    loss = PI0Loss(policy, attention="sdpa")(*arguments)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    found, wanted = gradients(policy), gradients(theirs)
    assert found.keys() == wanted.keys()
    whole = [torch.cat([side[name].flatten() for name in found]) for side in (found, wanted)]
    assert relative_error(*whole) <= 2e-6


def test_several_draws_are_the_mean_of_lerobots_losses(in_float64):
    policy, draws = make_policy().double(), 3
    batch, noise, time = to_float64(*make_batch(policy, draws=draws))
    expected = []
    for draw in range(draws):
        theirs = lerobots(policy, noise[draw::draws], time[draw::draws])
        expected.append(theirs.forward(batch)[0].item())
    assert PI0Loss(policy)(batch, noise, time).item() == pytest.approx(sum(expected) / draws, rel=1e-13)


def test_losses_of_rows_are_lerobots():
    policy = make_policy()
    batch, noise, time = make_batch(policy)
    expected, _ = lerobots(policy, noise, time).forward(batch, reduction="none")
    loss, weight = PI0Loss(policy), torch.tensor([0.5, 2.0, 0.1])
    torch.testing.assert_close(loss(batch, noise, time, per_row=True), expected)
    torch.testing.assert_close(loss({**batch, "row_weight": weight}, noise, time), (expected * weight).mean())


def test_a_frozen_prefix_runs_without_autograd():
    policy = make_policy()
    choose_trainable(policy, "expert")
    prefix = PI0Loss(policy).prefix(make_batch(policy)[0])
    assert not any(tensor.requires_grad for pair in prefix.keys_values for tensor in pair)


def test_a_kernel_that_ignores_what_the_state_may_not_see_is_wrong(monkeypatch):
    layer = make_policy().model.paligemma_with_expert.gemma_expert.model.layers[0].self_attn
    shapes = [(layer, Shape("suffix", 6, 4, 12, 6, True, 1))]
    assert what_is_wrong("sdpa", shapes, torch.device("cpu"), torch.float32) is None
    attention = torch.nn.functional.scaled_dot_product_attention

    def sees_all(query, key, value, bias, **options):
        return attention(query, key, value, bias[:, :, -1:], **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sees_all)
    assert "wrong result" in what_is_wrong("sdpa", shapes, torch.device("cpu"), torch.float32)


def test_work_of_the_real_policy_is_counted():
    """2 FLOP per weight and token forward and 4 backward: 2.3 B weights of images and language, 0.3 B of actions."""
    config = config_of(
        3,
        **{"image_resolution": (224, 224), "chunk_size": 50, "n_action_steps": 50, "tokenizer_max_length": 48},
        **{"max_action_dim": 32, "max_state_dim": 32},
    )
    expert, full = (flops_per_sample(config, 3, mode) for mode in ("expert", "full"))
    prefix, suffix = 3 * 256 + 48, 51
    assert expert == pytest.approx(2 * 2.3e9 * prefix + 6 * 0.3e9 * suffix, rel=0.1)
    assert full == pytest.approx(3 * expert, rel=0.05)
    assert family_of(config).tokens(config, 3) == 3 * 256 + 48 + 51
