"""PI0.5 policies, mostly tiny, and batches for the tests."""

import copy

import torch
from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.datasets import LeRobotDataset
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.policies.pi05.configuration_pi05 import PI05Config

from vla_finetuning.policies.tiny_pi05 import TinyPI05Config, TinyPI05Policy, make_tiny_base

STATE_DIM, ACTION_DIM = 4, 3


def make_config(cameras=2, *, chunk_size=6, image_size=28, **options):
    """A configuration of a policy with `cameras` square cameras `observation.images.0`, `.1`, ..."""
    inputs = {
        f"observation.images.{i}": PolicyFeature(FeatureType.VISUAL, (3, image_size, image_size))
        for i in range(cameras)
    }
    inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (STATE_DIM,))
    options = {
        "width": 32,
        "depth": 3,
        "mlp_dim": 64,
        "head_dim": 8,
        "vision_width": 32,
        "vision_mlp_dim": 64,
        "vocabulary": ["go", "to", "the", "red", "blue", "bin"],
        "tokenizer_max_length": 20,
        **options,
    }
    return TinyPI05Config(
        input_features=inputs,
        output_features={"action": PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))},
        chunk_size=chunk_size,
        n_action_steps=chunk_size,
        image_resolution=(28, 28),
        device="cpu",
        **options,
    )


def real_config(cameras=3, **options):
    """LeRobot's PI0.5 at its real size, for so many cameras."""
    config = PI05Config(device="cpu", **options)
    features = make_config(cameras, image_size=224)
    config.input_features, config.output_features = features.input_features, features.output_features
    return config


def make_base(folder, meta, **options):
    """A pretrained tiny PI0.5 for a dataset, by its metadata; `options` of `tiny_pi05.make_tiny_base` come first."""
    known = {"features": meta.features, "tasks": list(meta.tasks.values()), "stats": meta.stats, "fps": meta.fps}
    return make_tiny_base(folder, **{**known, **options})


def make_policy(cameras=2, *, seed=0, **options):
    """A policy all of whose weights are random: LeRobot starts some layers at zero, where a wrong gradient hides."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = TinyPI05Policy(make_config(cameras, **options))
    return perturb(policy, 0.05, seed=seed)


def perturb(policy, scale, *, seed=0):
    """Add random numbers to all weights, and return the policy."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=scale)
    return policy


def make_batch(policy, rows=4, *, seed=0, padded_language=True, missing=()):
    """What reaches `policy.forward`, with the noise and time that `fix_draws` makes LeRobot use."""
    config = policy.config
    generator = torch.Generator().manual_seed(seed)
    batch = {
        key: torch.rand((rows, *feature.shape), generator=generator)
        for key, feature in config.image_features.items()
        if key not in missing
    }
    tokens = (rows, config.tokenizer_max_length)
    batch["observation.language.tokens"] = torch.randint(0, config.vocab_size, tokens, generator=generator)
    lengths = torch.arange(rows)[:, None] * 3 % tokens[1] + 2 if padded_language else torch.full((rows, 1), tokens[1])
    batch["observation.language.attention_mask"] = torch.arange(tokens[1])[None] < lengths
    batch["action"] = torch.randn((rows, config.chunk_size, ACTION_DIM), generator=generator)
    batch["action_is_pad"] = torch.arange(config.chunk_size)[None] >= torch.arange(1, rows + 1)[:, None]
    noise = torch.randn((rows, config.chunk_size, config.max_action_dim), generator=generator)
    time = torch.rand(rows, generator=generator) * 0.998 + 0.001
    return batch, noise, time


def reference(policy, noise, time):
    """A copy of the policy whose `forward`, LeRobot's own, uses these draws."""
    policy = copy.deepcopy(policy)
    policy.model.sample_noise = lambda shape, device: noise
    policy.model.sample_time = lambda rows, device: time
    return policy


def lerobots_training(root, base):
    """Return the policy of a folder, a dataset and the preprocessor, as `lerobot-train` makes them, on the CPU."""
    config = PreTrainedConfig.from_pretrained(base, cli_overrides=["--device=cpu"])
    policy = get_policy_class(config.type).from_pretrained(base, config=config)
    seconds = [i / 10 for i in range(config.chunk_size)]
    dataset = LeRobotDataset("local/test", root=root, video_backend="pyav", delta_timestamps={"action": seconds})
    features = {**config.input_features, **config.output_features}
    normalizer = {"stats": dataset.meta.stats, "features": features, "norm_map": config.normalization_mapping}
    overrides = {"device_processor": {"device": "cpu"}, "normalizer_processor": normalizer}
    preprocessor, _ = make_pre_post_processors(config, pretrained_path=str(base), preprocessor_overrides=overrides)
    return policy, dataset, preprocessor


def act_config(input_features, action_dim=ACTION_DIM, **options):
    """Return LeRobot's configuration of a tiny ACT."""
    return ACTConfig(
        input_features=dict(input_features),
        output_features={"action": PolicyFeature(FeatureType.ACTION, (action_dim,))},
        device="cpu",
        **{
            **{"dim_model": 16, "n_heads": 2, "dim_feedforward": 16, "n_encoder_layers": 1, "n_vae_encoder_layers": 1},
            **{"pretrained_backbone_weights": None, **options},
        },
    )
