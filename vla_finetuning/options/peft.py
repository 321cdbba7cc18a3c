"""Options of adapters (LoRA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from vla_finetuning.options.fields import option


@dataclass
class PeftOptions:
    """Adapters (LoRA), with lerobot-train's flags."""

    method_type: str | None = option(
        None, "Train adapters of this kind. Any other option of this group asks for lora as well.", form="lora"
    )
    target_modules: list[str] | str | None = option(
        None,
        "Linear layers that have adapters; the policy type's own choice when absent (PI0.5: the action expert's q_proj "
        "and v_proj, and the projections of actions).",
        form="""suffixes of names, as '["q_proj", "v_proj"]', or a regular expression for whole names""",
    )
    full_training_modules: list[str] | None = option(None, "Layers that train whole, besides.")
    # Both leave the policy's output unchanged at the start. PEFT's other methods change the base weights.
    init_type: Literal["gaussian"] | None = option(None, "How adapters start: PEFT's own way when absent.")
    r: int = option(16, "Rank of the adapters.", min=1)
    lora_alpha: int | None = option(
        None, "Adapters are multiplied by lora_alpha / r; PEFT's own, 8, when absent.", min=1
    )
    export: Literal["merged", "adapter"] = option(
        "merged",
        "merged: OUTPUT_DIR/pretrained_model has the adapters in the policy's weights, as robots run it. adapter: "
        "besides, OUTPUT_DIR/adapter has them alone, for LeRobot and PEFT to put onto the policy that the run started "
        "from.",
    )

    def check(self, config: Any) -> None:
        if self.method_type is not None and self.method_type.lower() != "lora":
            raise ValueError(
                f"--peft.method_type={self.method_type}: expected lora; of PEFT's other methods none is tried"
            )

    @property
    def enabled(self) -> bool:
        return self.method_type is not None
