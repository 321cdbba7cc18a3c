"""Draw the charts of `metrics.jsonl`: every key with numbers is a chart over steps, under its own name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_finetuning.report import figures

Curves = dict[str, tuple[np.ndarray, np.ndarray]]
# Axis label and factor from the key's unit to the axis', by the suffix of the key; longer suffixes first.
UNITS = {
    "_bytes_per_s": ("GiB / s", 2.0**-30),
    "_per_s": ("per second", 1.0),
    "_bytes": ("GiB", 2.0**-30),
    "_s": ("s", 1.0),
}
# Patterns of keys that are drawn in the chart of another key.
COMPANIONS = ("eval_{}", "{}_low", "{}_high")
# Maximum number of curves of a dict; the names with the largest last values are drawn.
MOST_CURVES = 9


def metric_charts(lines: Sequence[Mapping[str, Any]], marks: Sequence[float] = ()) -> list[dict[str, str]]:
    """Draw every key of a run's log lines except `step`, in the order in which keys appear.

    A dict is a curve for each of its names. For a list, the first and the last one are drawn over their indices.
    Vertical lines are at `marks`, which are steps. Return {"title", "svg"} for each key, or {"title", "absent"} for a
    key without numbers or with zeros only.
    """
    keys = list(dict.fromkeys(key for line in lines for key in line if key != "step"))
    companions = {pattern.format(key): key for key in keys for pattern in COMPANIONS}
    charts = []
    for key in keys:
        if key not in companions:
            curves, x_name = _curves(lines, key)
            for pattern in COMPANIONS:
                curves |= _curves(lines, pattern.format(key), pattern)[0]
            charts.append({"title": key, **_draw(key, curves, x_name, marks)})
    return charts


def _curves(lines: Sequence[Mapping[str, Any]], key: str, named: str = "{}") -> tuple[Curves, str]:
    """Return the curves of a key, and the name of their x axis. `named` is the pattern of a dict's curves."""
    points = [(line["step"], line[key]) for line in lines if isinstance(line.get(key), int | float | dict | list)]
    last = points[-1][1] if points else None
    if isinstance(last, list):
        ends = {f"step {step}": _floats(values) for step, values in (points[0], points[-1])}
        curves = {name: ((np.arange(len(values)) + 0.5) / len(values), values) for name, values in ends.items()}
        return curves, key.rpartition("_by_")[2]  # the flow time of `eval_loss_by_time`
    steps = np.array([step for step, _ in points], float)
    if not isinstance(last, dict):
        return ({key: (steps, _floats([value for _, value in points]))} if points else {}), "steps"
    largest = sorted(last, key=lambda name: math.inf if last[name] is None else -last[name])[:MOST_CURVES]
    names = [name for name in last if name in largest]
    return {named.format(name): (steps, _floats([values.get(name) for _, values in points])) for name in names}, "steps"


def _floats(values: Sequence[float | None]) -> np.ndarray:
    return np.array([math.nan if value is None else value for value in values], float)


def _draw(key: str, curves: Curves, x_name: str, marks: Sequence[float]) -> dict[str, str]:
    axis, factor = next((unit for suffix, unit in UNITS.items() if key.endswith(suffix)), (key, 1.0))
    curves = {name: (x, factor * y) for name, (x, y) in curves.items()}
    values = np.concatenate([y[np.isfinite(y)] for _, y in curves.values()] or [np.zeros(0)])
    if not len(values) or not values.any():
        return {"absent": "0 throughout" if len(values) else "not measured in this run"}
    unit = axis != key
    chart = figures.line_chart(
        curves,
        xlabel="step" if x_name == "steps" else x_name,
        ylabel=axis,
        log=not unit and values.min() > 0 and values.max() > 30 * values.min(),
        from_zero=unit,
        marks=marks if x_name == "steps" else (),
    )
    texts = [
        f"{name if len(curves) > 1 else ''} from {finite[0]:.4g} to {finite[-1]:.4g}, lowest {finite.min():.4g}".strip()
        for name, (_, y) in curves.items()
        if len(finite := y[np.isfinite(y)])
    ]
    return {"svg": figures.to_svg(chart, f"{key} over {x_name}: {'; '.join(texts)}{f', {axis}' if unit else ''}")}
