"""Prepare a value function for a page: the distribution of labels, and values of some episodes beside their frames."""

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
    """Return the template's values for a run's `values.json`, or None if there is none."""
    values = read_json(folder / VALUES_NAME)
    if not values:
        return None
    return {
        "labels": [[key, f"{value:.4g}"] for key, value in values["labels"].items() if isinstance(value, int | float)],
        "histogram": advantages_chart(values["histogram"]),
        "episodes": [_episode(episode, folder) for episode in values["episodes"]],
    }


def advantages_chart(counted: Mapping[str, Any]) -> str:
    """Draw the distribution of advantages for each outcome (`plan.labels.histogram`), as SVG."""
    edges = np.asarray(counted["edges"])
    middle = (edges[:-1] + edges[1:]) / 2
    lines = {
        name: (middle, 100 * np.asarray(counts) / max(1, sum(counts))) for name, counts in counted["counts"].items()
    }
    chart = figures.line_chart(lines, xlabel="advantage", ylabel="frames / %", from_zero=True)
    return figures.to_svg(chart, "Distribution of advantages of successful and of failed episodes")


def _episode(episode: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    seconds = np.arange(len(episode["value"])) / episode["fps"]
    lines = {"value": (seconds, np.asarray(episode["value"])), "return": (seconds, np.asarray(episode["return"]))}
    title = f"episode {episode['episode']}, {'success' if episode['success'] else 'failure'}"
    chart = figures.line_chart(lines, xlabel="time in the episode / s", ylabel="value")
    film = {**episode, "title": title, "seed": "", "steps": len(episode["value"]), "problem": None}
    return {
        "title": plain(title),
        "instruction": plain(episode["instruction"], 120),
        "svg": figures.to_svg(chart, f"{title}: value and return over time"),
        "uri": shown_films([film], folder)[0]["uri"],
    }
