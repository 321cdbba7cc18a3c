"""The families that are known, by LeRobot's name of the policy type: a new one is a line here."""

from collections.abc import Callable
from typing import Any

from lerobot.configs import PreTrainedConfig

from vla_finetuning.policies import tiny_pi05  # noqa: F401  (registers the demo's policy type with LeRobot)
from vla_finetuning.policies.act import ACT
from vla_finetuning.policies.evo1 import Evo1
from vla_finetuning.policies.family import Family
from vla_finetuning.policies.fastwam import FastWAM
from vla_finetuning.policies.molmoact2 import MolmoAct2
from vla_finetuning.policies.pi0 import PI0, PI0FAST
from vla_finetuning.policies.pi05 import PI05
from vla_finetuning.policies.queued import Queued
from vla_finetuning.policies.smolvla import SmolVLA
from vla_finetuning.policies.vqbet import VQBeT
from vla_finetuning.policies.xvla import XVLA


class VLAJEPA(Family):
    """VLA-JEPA and types that derive from it."""

    without_effect = {"reinit_modules": "weights that all fit the configuration: here none may be left out"}


PALIGEMMA = "google/paligemma-3b-pt-224"

FAMILIES = {
    family.type: family
    for family in (
        PI05("pi05", as_lerobot=True, chunk_draws="noise", tokenizer=PALIGEMMA),
        ACT("act", as_lerobot=True, chunk_draws="nothing", in_float32=True),
        Queued("diffusion", as_lerobot=True, in_float32=True, sized_by_images=True),
        PI0("pi0", as_lerobot=True, chunk_draws="noise", tokenizer=PALIGEMMA),
        SmolVLA("smolvla", as_lerobot=True, chunk_draws="noise", tokenizer_option="vlm_model_name"),
        PI0FAST("pi0_fast", as_lerobot=True, tokenizer_option="text_tokenizer_name"),
        XVLA("xvla", as_lerobot=True, tokenizer_option="tokenizer_name"),
        VQBeT("vqbet", as_lerobot=True, in_float32=True, sized_by_images=True),
        Queued(
            "multi_task_dit",
            as_lerobot=True,
            tokenizer_option="text_encoder_name",
            in_float32=True,
            sized_by_images=True,
        ),
        Evo1("evo1", as_lerobot=True, tokenizer_option="vlm_model_name", reads_texts=True),
        VLAJEPA(
            "vla_jepa", as_lerobot=True, tokenizer_option="qwen_model_name", reads_texts=True, sized_by_images=True
        ),
        FastWAM(
            "fastwam", as_lerobot=True, tokenizer_option="tokenizer_model_id", reads_texts=True, sized_by_images=True
        ),
        Family("eo1", as_lerobot=True, tokenizer_option="vlm_base", reads_texts=True),
        MolmoAct2("molmoact2", as_lerobot=True, tokenizer_option="checkpoint_path", reads_texts=True),
        Family("tdmpc", refused="its target network follows the others after every step, without a gradient"),
        Family("gaussian_actor", refused="it is an actor of online reinforcement learning, and its forward is no loss"),
        Family("groot", refused="its forward needs the package dm-tree, which is not in requirements.lock"),
        Family(
            "wall_x", refused="it needs the packages torchdiffeq and qwen-vl-utils, which are not in requirements.lock"
        ),
        Family(
            "lingbot_va",
            refused="LeRobot computes its training attention in half precision, by kernels that have no gradient on a "
            "CPU, so that no test can show it",
        ),
    )
}


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a policy by its configuration, or of what its configuration derives from; else a plain one."""
    return _family_of(type(config), config.type)


def _family_of(config_class: type, kind: str) -> Family:
    names = {kind: name for name, kind in PreTrainedConfig.get_known_choices().items()}
    known = (FAMILIES.get(names.get(kind, "")) for kind in config_class.__mro__)
    return next(filter(None, known), Family(kind))


def types_that(can: Callable[[Family], object]) -> str:
    """The policy types that satisfy a condition, for a message."""
    return ", ".join(name for name, family in FAMILIES.items() if can(family))


def require_trained(kind: Any, where: str) -> None:
    """Refuse a type that is not trained here, by its name alone: making a configuration of some asks the Hub.

    Raises:
        ValueError: there is no such type; it is not trained here, and why; no test shows that it is trained as LeRobot
            does. Says `where` it was asked for.
    """
    known = PreTrainedConfig.get_known_choices()
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(f"{where}: no policy is of type {kind!r}; LeRobot knows {', '.join(sorted(known))}")
    family = _family_of(known[kind], kind)
    if family.refused:
        raise ValueError(f"{where}: a '{kind}' is not trained here: {family.refused}. Train it with lerobot-train")
    if not family.as_lerobot:
        raise ValueError(
            f"{where}: that a '{kind}' is trained here as by lerobot-train is shown by no test, as it is for "
            f"{types_that(lambda family: family.as_lerobot)}: train it with lerobot-train"
        )
