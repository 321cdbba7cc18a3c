"""Tiny policies of each family with flow matching, their batches, and LeRobot's own losses and gradients of them."""

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.pi0 import modeling_pi0
from lerobot.policies.pi0.configuration_pi0 import PI0Config
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

from tests import tiny
from tests.tiny import reference
from tests.tiny_backbones import VOCABULARY, tiny_paligemma
from vla_finetuning.policies.registry import family_of

KINDS = ("pi05", "pi0", "smolvla")
CHUNK, WIDTH, STATE, ROWS = 5, 8, 4, 3
# Attention does not change when a vector is added to all its keys, so the true gradient of this bias is zero.
KEY_BIAS = "k_proj.bias"


def _config(config_class, size, cameras, options):
    images = {f"observation.images.{i}": PolicyFeature(FeatureType.VISUAL, (3, *size)) for i in range(cameras)}
    sizes = {"chunk_size": CHUNK, "n_action_steps": CHUNK, "max_state_dim": 6, "max_action_dim": WIDTH}
    return config_class(
        input_features={**images, "observation.state": PolicyFeature(FeatureType.STATE, (STATE,))},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (3,))},
        device="cpu",
        **{**sizes, "tokenizer_max_length": 12, **options},
    )


def pi0_config(cameras=2, **options):
    return _config(PI0Config, (28, 28), cameras, {"image_resolution": (28, 28), **options})


def smolvla_config(backbone, cameras=2, **options):
    """Configure SmolVLA on the backbone that `tiny_backbones.smolvlm` writes, with resized images."""
    own = {"resize_imgs_with_padding": (32, 32), "num_vlm_layers": 4, **backbone}
    return _config(SmolVLAConfig, (40, 48), cameras, {**own, **options})


def make_policy(kind, backbone=None, cameras=2, **options):
    """Randomise all weights: LeRobot starts some at zero or one, where a wrong gradient hides."""
    if kind == "pi05":
        return tiny.make_policy(cameras, **options)
    with torch.random.fork_rng(devices=[]), tiny_paligemma(modeling_pi0):
        torch.manual_seed(0)
        if kind == "pi0":
            policy = modeling_pi0.PI0Policy(pi0_config(cameras, **options))
        else:
            policy = SmolVLAPolicy(smolvla_config(backbone, cameras, **options))
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(torch.randn(parameter.shape), alpha=0.05)
    return policy


def make_batch(policy, *, missing=None, draws=1):
    """Make ROWS rows with prompts and chunks of several lengths, without the camera `missing`; noise and time."""
    config, generator = policy.config, torch.Generator().manual_seed(1)
    batch = {
        key: torch.rand((ROWS, *feature.shape), generator=generator)
        for key, feature in config.image_features.items()
        if key != f"observation.images.{missing}" and "empty" not in key
    }
    length, chunk = config.tokenizer_max_length, config.chunk_size
    batch["observation.language.tokens"] = torch.randint(
        0, getattr(config, "vocab_size", VOCABULARY), (ROWS, length), generator=generator
    )
    batch["observation.language.attention_mask"] = torch.arange(length) < 3 * torch.arange(ROWS)[:, None] + 2
    batch["observation.state"] = torch.randn((ROWS, STATE), generator=generator)
    batch["action"] = torch.randn((ROWS, chunk, 3), generator=generator)
    batch["action_is_pad"] = torch.arange(chunk) >= chunk - 2 * torch.arange(ROWS)[:, None]
    noise = torch.randn((ROWS * draws, chunk, config.max_action_dim), generator=generator)
    return batch, noise, torch.rand(ROWS * draws, generator=generator) * 0.998 + 0.001


def make_loss(policy, **options):
    return family_of(policy.config).make_loss(policy, **options)


def lerobots(policy, batch, noise, time, reduction="mean"):
    """Compute LeRobot's loss on equal weights, and the gradients of its trainable parameters."""
    theirs = reference(policy, noise, time)
    theirs.zero_grad()
    loss, _ = theirs.forward(dict(batch), reduction=reduction)
    loss.mean().backward()
    return loss.detach(), gradients(theirs)


def gradients(policy):
    return {name: p.grad for name, p in policy.named_parameters() if p.requires_grad}


def to_float64(batch, noise, time):
    batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    return batch, noise.double(), time.double()


def relative_error(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


def joint_error(actual, expected):
    """Return the relative error of all gradients as one vector."""
    assert actual.keys() == expected.keys()
    return relative_error(*(torch.cat([side[name].flatten() for name in expected]) for side in (actual, expected)))


def assert_equal_gradients(actual, expected, tolerance=1e-12):
    """Compare each; those that are zero but for rounding, relative to the gradient of their layer's weights."""
    assert actual.keys() == expected.keys() and None not in actual.values()
    scales = {name: expected[name.replace(KEY_BIAS, "k_proj.weight")].norm() for name in expected}
    errors = {name: ((actual[name] - expected[name]).norm() / scales[name]).item() for name in expected}
    assert max(errors.values()) <= tolerance, sorted(errors.items(), key=lambda item: -item[1])[:3]
