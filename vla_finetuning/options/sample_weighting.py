"""Options of the weights of rows in the loss (RA-BC)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from vla_finetuning.options.fields import option


@dataclass
class SampleWeightingOptions:
    """Weights of rows in the loss, as lerobot-train's."""

    type: Literal["rabc", "uniform"] | None = option(
        None,
        "rabc: weight rows by the progress that a reward model predicted; any other option of this group implies it. "
        "uniform: equal weights, the default.",
    )
    progress_path: str | None = option(
        None,
        "A local parquet file, or hf://datasets/USER/NAME/FILE. Default: the dataset's sarm_progress.parquet.",
        file="path",
    )
    head_mode: Literal["sparse", "dense"] = option(
        "sparse", "Column of the progress file: progress_sparse or progress_dense."
    )
    kappa: float = option(0.01, "Progress within an action chunk above which a row has weight 1.")
    epsilon: float = option(1e-6, "Constant added to the denominators of weights.", above=0)
    extra_params: dict[str, Any] = option(
        {},
        "Weight of frames without a known progress.",
        form="""JSON, as '{"fallback_weight": 1.0}'""",
    )

    def check(self, config: Any) -> None:
        if unknown := sorted(self.extra_params.keys() - {"fallback_weight"}):
            raise ValueError(f"--sample_weighting.extra_params has {unknown}; RA-BC takes fallback_weight there")
        fallback = self.extra_params.get("fallback_weight", 1.0)
        if isinstance(fallback, bool) or not isinstance(fallback, int | float) or not 0 <= fallback < math.inf:
            raise ValueError(
                f"--sample_weighting.extra_params: fallback_weight is {fallback!r:.50}, expected a number of at least 0"
            )


def describe_weights(weights: Any) -> list[str]:
    """Return the plan's lines on the weights of frames, an array."""
    return [
        f"Weighted     rows in the loss, by RA-BC: of {len(weights)} frames {(weights == 0).sum()} have weight 0 and "
        f"{(weights == 1).sum()} weight 1; normalised within each micro-batch, as lerobot-train"
    ]
