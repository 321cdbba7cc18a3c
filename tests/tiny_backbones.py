"""LeRobot's policies at sizes that train in a second: ordinary options, and local folders in place of the Hub's.

What LeRobot 0.6.1 takes from no option and no folder is patched, for as long as a `Kind`'s `here` lasts.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from lerobot.policies.pi0 import modeling_pi0
from lerobot.processor import tokenizer_processor

from vla_finetuning.policies import pipelines
from vla_finetuning.policies.tiny_pi05 import make_tokenizer

WORDS = ["go", "to", "the", "red", "blue", "bin"]
VOCABULARY = 512


@dataclass(frozen=True)
class Kind:
    """A policy type to be tried.

    Attributes:
        options: of the policy, `--policy.*`.
        folders: writes what the options name into a folder, and returns those options.
        here: what has to be patched to build it.
        cameras: of the dataset, with their (height, width).
    """

    options: dict[str, str | float | int]
    folders: Callable[[Path], dict[str, str]] = lambda folder: {}
    here: Callable[[], AbstractContextManager] = contextlib.nullcontext
    run: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def tiny_paligemma(modeling):
    """LeRobot's PI0 or PI0-FAST, by its module, with a small vision tower and vocabulary; a tokenizer of this file."""
    sizes = SimpleNamespace(width=32, depth=2, mlp_dim=32, num_heads=8, num_kv_heads=1, head_dim=8)
    names = ("PaliGemmaForConditionalGenerationWithPiGemma", "PiGemmaForCausalLM")
    paligemma, expert = (getattr(modeling, name, None) for name in names)

    def small(config):
        vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
        for name, value in (*vision.items(), ("patch_size", 14), ("projection_dim", 32)):
            setattr(config.vision_config, name, value)
        config.text_config.vocab_size = config._vocab_size = config.image_token_index = VOCABULARY
        return paligemma(config)

    def small_expert(config):
        config.vocab_size = VOCABULARY
        return expert(config)

    tokenizers = SimpleNamespace(from_pretrained=lambda *_, **__: make_tokenizer(WORDS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling, "get_gemma_config", lambda variant: sizes)
        patch.setattr(modeling, names[0], small)
        if expert is not None:
            patch.setattr(modeling, names[1], small_expert)
        patch.setattr(tokenizer_processor, "AutoTokenizer", tokenizers)
        patch.setattr(pipelines, "require_model", lambda *_: None)
        yield


# Small, and with schedules of which ten steps see every part.
ACT = Kind(
    {
        **{"chunk_size": 4, "n_action_steps": 4, "dim_model": 16, "n_heads": 2, "dim_feedforward": 16},
        **{"n_encoder_layers": 1, "n_vae_encoder_layers": 1, "latent_dim": 4, "pretrained_backbone_weights": "null"},
        # Two rates.
        **{"optimizer_lr": 1e-4, "optimizer_lr_backbone": 1e-5, "optimizer_weight_decay": 0.1},
    }
)
DIFFUSION = Kind(
    {
        **{"horizon": 8, "n_action_steps": 4, "down_dims": "[8, 16]", "diffusion_step_embed_dim": 8, "n_groups": 4},
        **{"crop_shape": "[40, 40]", "spatial_softmax_num_keypoints": 4, "num_train_timesteps": 10},
        **{"scheduler_warmup_steps": 3, "optimizer_weight_decay": 0.01, "pretrained_backbone_weights": "null"},
    }
)
PALIGEMMA = {
    **{"chunk_size": 4, "n_action_steps": 4, "max_state_dim": 8, "max_action_dim": 8, "tokenizer_max_length": 12},
    **{"image_resolution": "[28, 28]", "scheduler_warmup_steps": 3, "scheduler_decay_steps": 7, "optimizer_lr": 1e-4},
}
PI0 = Kind(PALIGEMMA, here=lambda: tiny_paligemma(modeling_pi0))

KINDS = {"act": ACT, "diffusion": DIFFUSION, "pi0": PI0}
