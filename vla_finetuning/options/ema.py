"""Options of the exponential moving average of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from vla_finetuning.options.fields import option


@dataclass
class EmaOptions:
    """An exponential moving average of the weights that train, fp32 (lerobot-train has none; openpi does)."""

    enable: bool = option(False, "Average the trained weights. --ema.decay implies it.")
    # openpi's default; its LIBERO recipe has 0.999.
    decay: float = option(
        0.99, "Decay of the average per step: 0.99 averages about the last 100 steps.", above=0, below=1
    )

    def describe(self) -> list[str]:
        """Return the plan's lines on the average."""
        if not self.enable:
            return []
        steps = 1 / (1 - self.decay)
        return [
            f"Average      of the weights that train, about the last {steps:.0f} steps: it is measured and exported"
        ]
