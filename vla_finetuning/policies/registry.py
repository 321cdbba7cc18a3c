"""The families that are known, by LeRobot's name of the policy type: a new one is a line here."""

from collections.abc import Callable

from lerobot.configs import PreTrainedConfig

from vla_finetuning.policies import tiny_pi05  # noqa: F401  (registers the demo's policy type with LeRobot)
from vla_finetuning.policies.family import Family
from vla_finetuning.policies.pi05 import PI05

PALIGEMMA = "google/paligemma-3b-pt-224"

FAMILIES = {
    family.type: family
    for family in (
        PI05("pi05", as_lerobot=True, chunk_draws="noise", tokenizer=PALIGEMMA),
        Family("act", as_lerobot=True, chunk_draws="nothing"),
        Family("diffusion", as_lerobot=True),
        Family("pi0", as_lerobot=True, chunk_draws="noise", tokenizer=PALIGEMMA),
        Family("smolvla", chunk_draws="noise", tokenizer_option="vlm_model_name"),
        Family("pi0_fast", tokenizer_option="text_tokenizer_name"),
        Family("xvla", tokenizer_option="tokenizer_name"),
        Family("multi_task_dit", tokenizer_option="text_encoder_name"),
    )
}


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a policy by its configuration, or of what its configuration derives from; else a plain one."""
    names = {kind: name for name, kind in PreTrainedConfig.get_known_choices().items()}
    known = (FAMILIES.get(names.get(kind, "")) for kind in type(config).__mro__)
    return next(filter(None, known), Family(config.type))


def types_that(can: Callable[[Family], object]) -> str:
    """The policy types of which something is true, for a message."""
    return ", ".join(name for name, family in FAMILIES.items() if can(family))
