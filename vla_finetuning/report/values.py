"""A value function on a page: how labels fell, and what it thought of some episodes, beside what the robot saw."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vla_finetuning.files import read_json
from vla_finetuning.report import figures
from vla_finetuning.report.figures import plain
from vla_finetuning.report.loop import shown_films
from vla_finetuning.run.folder import VALUES_NAME


def values_section(folder: Path) -> dict[str, Any] | None:
    """Return what the template shows of a run's `values.json`; None if there is none."""
    found = read_json(folder / VALUES_NAME)
    if not found:
        return None
    labels = found["labels"]
    shares = {
        "all": ("frames", "positive"),
        "of successful episodes": ("", "positive_of_successes"),
        "of failed episodes": ("", "positive_of_failures"),
    }
    return {
        "rows": [[name, f"{labels[key]:.1%}"] for name, (_, key) in shares.items()],
        "frames": f"{labels['frames']:,}",
        "auroc": [
            [name, _number(labels.get(key)), _number(labels.get(f"{key}_held_out"))]
            for name, key in (
                (f"advantages over {labels['horizon']} frames of an episode", "auroc"),
                ("values of the last frame", "auroc_last"),
            )
        ],
        "histogram": advantages_chart(found["histogram"]),
        "episodes": [_episode(one, folder) for one in found["episodes"]],
    }


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def advantages_chart(counted: Mapping[str, Any]) -> str:
    """Draw how many frames of each outcome have which advantage (`run.labels.histogram`), as SVG."""
    edges = np.asarray(counted["edges"])
    middle = (edges[:-1] + edges[1:]) / 2
    lines = {
        name: (middle, 100 * np.asarray(counts) / max(1, sum(counts))) for name, counts in counted["counts"].items()
    }
    chart = figures.line_chart(lines, xlabel="advantage", ylabel="frames / %", from_zero=True)
    return figures.to_svg(chart, "Distribution of advantages of successful and of failed episodes")


def _episode(one: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    seconds = np.arange(len(one["value"])) / one["fps"]
    lines = {"value": (seconds, np.asarray(one["value"])), "return": (seconds, np.asarray(one["return"]))}
    title = f"episode {one['episode']}, {'success' if one['success'] else 'failure'}"
    chart = figures.line_chart(lines, xlabel="time in the episode / s", ylabel="value")
    film = {**one, "title": title, "seed": "", "steps": len(one["value"]), "problem": None}
    return {
        "title": plain(title),
        "instruction": plain(one["instruction"], 120),
        "svg": figures.to_svg(chart, f"{title}: value and return over time"),
        "uri": shown_films([film], folder)[0]["uri"],
    }
