"""Prepare the closed loop for a page: tables and charts of success, and films of episodes."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_finetuning.report import figures
from vla_finetuning.report.figures import plain
from vla_finetuning.run.folder import FILMS, evaluations


def closed_loop(
    evaluation: Mapping[str, Any], folder: Path, lines: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Return the template's values for success after a run and during it; None if the policy was not evaluated.

    `evaluation` is the content of evaluation.json; `lines` are those of metrics.jsonl, some with held-out episodes.
    """
    scores = evaluation.get("closed_loop") or {}
    over_steps = [*evaluations(folder), *(_held_out(line) for line in lines if line.get("held_out_episodes"))]
    if not scores and not over_steps:
        return None
    rows = [score_row({**line, "label": f"step {line['step']:,}"}) for line in over_steps]
    return {
        "over_steps": rows,
        "by_task": _by_task(over_steps),
        "chart": _curve([(line["step"], line) for line in over_steps if line["episodes"]], "step", "steps"),
        "scores": [score_row(score) for score in scores.values()],
        "films": shown_films(evaluation.get("films", ()), folder),
    }


def _held_out(line: Mapping[str, Any]) -> dict[str, Any]:
    return {"step": line["step"], **{key.removeprefix("held_out_"): value for key, value in line.items()}}


def _by_task(over_steps: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return a row for each task and a column for each checkpoint, or None if there are no scores by task."""
    by_step = [(line["step"], {row["label"]: row for row in line.get("by_task", ())}) for line in over_steps]
    tasks = list(dict.fromkeys(task for _, score_by_task in by_step for task in score_by_task))
    if not tasks:
        return None
    rows = [[plain(task, 200), *(_count(score_by_task.get(task)) for _, score_by_task in by_step)] for task in tasks]
    return {"head": ["task", *(f"step {step:,}" for step, _ in by_step)], "rows": rows}


def _count(score: Mapping[str, Any] | None) -> str:
    if score is None:
        return "–"
    errors = f" ({score['errors']} errors)" if score.get("errors") else ""
    return f"{score['successes']:,} of {score['episodes']:,}{errors}"


def over_latency(by_latency: Mapping[Any, Sequence[Mapping[str, Any]]]) -> str | None:
    """Draw success over latencies in seconds, by the first score of each; None if no episode was played."""
    points = [(1000 * latency_s, rows[0]) for latency_s, rows in by_latency.items() if rows[0]["episodes"]]
    return _curve(points, "latency / ms", "latencies")


def _curve(points: Sequence[tuple[float, Mapping[str, Any]]], xlabel: str, over: str) -> str | None:
    """Draw scores with their intervals over x; None for no points."""
    if not points:
        return None
    x = np.array([place for place, _ in points], float)
    success = np.array([score["successes"] / (score["episodes"] + score.get("errors", 0)) for _, score in points])
    low, high = np.array([score["interval"] for _, score in points]).T
    chart = figures.interval_chart(x, 100 * success, 100 * low, 100 * high, xlabel=xlabel, ylabel="success / %")
    label = f"Success in the loop over {over}: from {success[0]:.0%} to {success[-1]:.0%}, at most {success.max():.0%}"
    return figures.to_svg(chart, label)


def score_row(score: Mapping[str, Any]) -> list[str]:
    """Return a table row for a result of `evaluation.intervals.score` with a `label`."""
    successes, episodes = score["successes"], score["episodes"]
    cells = []
    for outcome in ("", "_at_end"):
        low, high = score[f"interval{outcome}"]
        share = f"{score[f'successes{outcome}'] / episodes:.1%}" if episodes else "–"
        cells += [share, f"{low:.1%} to {high:.1%}"]
    return [plain(score["label"], 200), f"{successes:,}", f"{episodes:,}", *cells, _format_notes(score)]


def _format_notes(score: Mapping[str, Any]) -> str:
    notes = [f"{score['went_where_told']} followed the given instruction"] if "went_where_told" in score else []
    notes += [f"{score['went_to_a_bin']} went to a bin"] if "went_to_a_bin" in score else []
    if "scenes" in score:
        notes.append(f"of {score['scenes']:,} distinct scene{'s' * (score['scenes'] != 1)}")
    return "; ".join(notes + ([f"{score['errors']} more ended in an error"] if score.get("errors") else []))


def shown_films(films: Sequence[Mapping[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Return title, text and data URI of each film, or the problem if its file is missing or a link."""
    entries = []
    for film in films:
        steps = f"{film['steps']} step{'s' * (film['steps'] != 1)}"
        text = f"“{plain(film['instruction'], 120)}”, " if film["instruction"] else ""
        changes = ", then ".join(f"“{written}”" for written, _ in itertools.groupby(film.get("texts", ())))
        suffix = f"; the policy wrote {plain(changes, 300)}" if changes else ""
        uri, problem = None, film["problem"]
        if film["file"]:
            path = folder / FILMS / Path(film["file"]).name
            if path.is_symlink() or path.parent.is_symlink():
                problem = f"{path} is a link, and what it leads to is not for a page that others are shown"
            elif path.is_file():
                uri = "data:image/webp;base64," + base64.b64encode(path.read_bytes()).decode()
            else:
                problem = f"{path} is gone"
        entries.append(
            {
                **{"title": plain(film["title"], 120), "success": film["success"], "uri": uri},
                **{"text": f"{text}seed {film['seed']}, {steps}{suffix}", "problem": plain(problem or "", 300)},
            }
        )
    return entries
