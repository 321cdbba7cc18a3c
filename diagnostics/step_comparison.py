"""Two results of `profile_step` side by side, and whether they differ by more than their own spread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from diagnostics.step_report import StepReport


class Verdict(NamedTuple):
    """B's time per step over A's, with its 95 % interval."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        interval = f"95 % interval {self.low:.3f} to {self.high:.3f}"
        if self.low <= 1 <= self.high:
            return f"no difference that these blocks can show: B takes {self.ratio:.3f} of A's time ({interval})"
        faster = f"{1 / self.ratio:.2f}x faster" if self.ratio < 1 else f"{self.ratio:.2f}x slower"
        return f"B is {faster}: it takes {self.ratio:.3f} of A's time ({interval})"


def judge(a: Sequence[float], b: Sequence[float]) -> Verdict:
    """Welch's t interval of the ratio of two geometric means. Blocks are the samples: steps depend on their neighbours.

    Raises:
        ValueError: fewer than two blocks: there is no spread to judge by.
    """
    if min(len(a), len(b)) < 2:
        raise ValueError("one block of steps has no spread to judge by: measure with more --profile_steps")
    log_a, log_b = np.log(a), np.log(b)
    ratio = float(np.exp(log_b.mean() - log_a.mean()))
    if np.ptp(log_a) == np.ptp(log_b) == 0:
        return Verdict(ratio, ratio, ratio)
    low, high = stats.ttest_ind(log_b, log_a, equal_var=False).confidence_interval(0.95)
    return Verdict(ratio, float(np.exp(low)), float(np.exp(high)))


def compare(a: StepReport, b: StepReport) -> str:
    """The A/B table: untouched steps and phases, what differs between the runs, and the verdict."""
    lines = [f"{key:36} A {left}   B {right}" for key, left, right in _differences(a, b)] or ["the same settings"]
    lines += ["", f"{'phase (adds, mean ms)':28}{'A':>10}{'B':>10}{'B - A':>10}{'B / A':>8}"]
    rows = [(p, a.phases[p].exposed.mean, b.phases[p].exposed.mean) for p in a.phases if p in b.phases]
    for name, left, right in [*rows, ("step, untouched", a.untouched_s, b.untouched_s)]:
        ratio = f"{right / left:8.2f}" if left else f"{'-':>8}"
        lines.append(f"{name:28}{1e3 * left:10.2f}{1e3 * right:10.2f}{1e3 * (right - left):+10.2f}{ratio}")
    steps_a, steps_b = a.step_s["untouched"], b.step_s["untouched"]
    lines += ["", f"per step: {judge(steps_a, steps_b)}"]
    if a.global_batch_size != b.global_batch_size:
        rows_a, rows_b = ([s / r.global_batch_size for s in r.step_s["untouched"]] for r in (a, b))
        lines.append(f"per row:  {judge(rows_a, rows_b)}")
    if a.environment.gpus != b.environment.gpus or a.environment.cpu != b.environment.cpu:
        lines.append("They were measured on different hardware: the verdict is about that too.")
    return "\n".join(lines)


def _differences(a: StepReport, b: StepReport) -> list[tuple[str, Any, Any]]:
    """What was set, or installed, differently."""

    def flat(report: StepReport) -> dict[str, Any]:
        environment = report.environment
        top: dict[str, Any] = {
            "git revision": environment.git_revision,
            "gpus": environment.gpus,
            "cpu": environment.cpu,
        }
        top |= {f"{name} version": version for name, version in environment.versions.items()}
        top |= {f"profile {name}": value for name, value in report.settings.model_dump().items()}
        for key, value in report.config.items():
            nested = value if isinstance(value, dict) and key != "rename_map" else None
            top |= {f"--{key}.{k}": v for k, v in nested.items()} if nested is not None else {f"--{key}": value}
        return top

    left, right = flat(a), flat(b)
    return [(key, left.get(key), right.get(key)) for key in left | right if left.get(key) != right.get(key)]
