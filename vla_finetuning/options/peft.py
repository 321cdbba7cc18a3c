"""Options of adapters (LoRA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from vla_finetuning.options.fields import option


@dataclass
class PeftOptions:
    """Adapters (LoRA), with lerobot-train's flags."""

    method_type: str | None = option(
        None, "Train adapters of this kind. Any other option of this group implies lora.", form="lora"
    )
    target_modules: list[str] | str | None = option(
        None,
        "Linear layers with adapters. Default: the policy type's choice (PI0.5: the action expert's q_proj and "
        "v_proj, and the action projections).",
        form="""suffixes of names, as '["q_proj", "v_proj"]', or a regular expression for whole names""",
    )
    full_training_modules: list[str] | None = option(None, "Layers to train whole, besides the adapters.")
    # Both leave the policy's output unchanged at the start. PEFT's other methods change the base weights.
    init_type: Literal["gaussian"] | None = option(None, "Initialisation of adapters. Default: PEFT's own.")
    r: int = option(16, "Rank of the adapters.", min=1)
    lora_alpha: int | None = option(
        None, "Scale of adapters: lora_alpha / r. Default: PEFT's own lora_alpha, 8.", min=1
    )
    export: Literal["merged", "adapter"] = option(
        "merged",
        "merged: OUTPUT_DIR/pretrained_model has the adapters merged into the policy's weights, for robots. adapter: "
        "OUTPUT_DIR/adapter also has them alone, for LeRobot and PEFT to load onto the initial policy.",
    )

    def check(self, config: Any) -> None:
        if self.method_type is not None and self.method_type.lower() != "lora":
            raise ValueError(
                f"--peft.method_type={self.method_type}: expected lora; no other method of PEFT is supported"
            )

    @property
    def enabled(self) -> bool:
        return self.method_type is not None
