"""The held-out loss in a run's report: over steps, by flow time, and by task. From the lines of `metrics.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_finetuning.report import figures

# Tasks whose loss rose most since it was lowest come first.
TASKS_SHOWN = 12
Line = Mapping[str, Any]


def held_out_loss(lines: Sequence[Line]) -> dict[str, Any] | None:
    """Charts and a table of the run's evaluations; None if there were none.

    Returns:
        `{"charts": [{"title", "svg"}], "by_task": (head, rows) or None, "by_robot": the same}`.
    """
    measured = [line for line in lines if line.get("eval_loss") is not None]
    if not measured:
        return None
    steps, losses = (np.array([line[key] for line in measured], float) for key in ("step", "eval_loss"))
    of_training = (np.array([line["step"] for line in lines], float), np.array([line["loss"] for line in lines], float))
    curves = {"training": of_training, "held out": (steps, losses)}
    chart = figures.line_chart(curves, xlabel="step", ylabel="loss")
    whole = np.array([not line.get("eval_skipped") for line in measured])
    # Over fewer rows it is another number.
    compared_losses = np.where(whole, losses, np.nan) if np.isfinite(losses[whole]).any() else losses
    best = measured[int(np.nanargmin(compared_losses))] if np.isfinite(losses).any() else measured[-1]
    description = f"Held-out loss over steps: from {losses[0]:.4g} to {losses[-1]:.4g}, lowest {best['eval_loss']:.4g}"
    if not whole.all():
        description += f"; {np.sum(~whole)} of {len(whole)} times without rows that could not be read"
    charts = [{"title": "Loss, trained on and held out", "svg": figures.to_svg(chart, description)}]
    compared = {f"step {line['step']}": line for line in (measured[0], best, measured[-1])}
    if all(line.get("eval_loss_by_time") for line in compared.values()):
        charts.append({"title": "Held-out loss by flow time (0: the action, 1: noise)", "svg": _by_time(compared)})
    return {
        "charts": charts,
        "by_task": _by_task(compared, best, measured[-1]),
        "by_robot": _by_robot(compared),
    }


def _by_robot(compared: Mapping[str, Line]) -> tuple[list[str], list[list[str]]] | None:
    """The loss of each robot when it was first, lowest and last measured; None where there is one robot."""
    lines = [line.get("eval_loss_by_robot") for line in compared.values()]
    if not all(lines):
        return None
    values = [{robot: math.nan if value is None else value for robot, value in (line or {}).items()} for line in lines]
    rows = [[robot, *(f"{of.get(robot, math.nan):.4g}" for of in values)] for robot in values[-1]]
    return ["robot", *compared], rows


def _by_time(compared: Mapping[str, Line]) -> str:
    lines = {}
    for name, line in compared.items():
        values = np.array([math.nan if value is None else value for value in line["eval_loss_by_time"]])
        lines[name] = ((np.arange(len(values)) + 0.5) / len(values), values)
    return figures.to_svg(
        figures.line_chart(lines, xlabel="flow time", ylabel="loss"),
        f"Held-out loss by flow time, at {', '.join(lines)}",
    )


def _by_task(compared: Mapping[str, Line], best: Line, last: Line) -> tuple[list[str], list[list[str]]] | None:
    """The loss of each task when it was first, lowest and last measured; what got worse since comes first."""
    if not all(line.get("eval_loss_by_task") for line in compared.values()):
        return None

    def loss(line: Line, task: str) -> float:
        value = line["eval_loss_by_task"].get(task)
        return math.nan if value is None else value

    def worse(task: str) -> float:
        risen = loss(last, task) - loss(best, task)
        return -math.inf if math.isnan(risen) else risen

    tasks = sorted(last["eval_loss_by_task"], key=lambda task: (-worse(task), task))[:TASKS_SHOWN]
    rows = [[task, *(f"{loss(line, task):.4g}" for line in compared.values())] for task in tasks]
    return ["instruction", *compared], rows
