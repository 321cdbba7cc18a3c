"""A run's `report.html`: success before, on the way and after, the curves, and where the time went.

    python -m vla_finetuning.rl.learning_page OUTPUT_DIR

writes it anew from what the run's folder holds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from vla_finetuning.files import read_json, read_lines
from vla_finetuning.options.job import CONFIG_NAME
from vla_finetuning.report import figures, page
from vla_finetuning.report.loop import closed_loop, score_row
from vla_finetuning.report.page import REPORT_NAME, Metrics, columns, page_template, write_page
from vla_finetuning.run.folder import EVALUATION_NAME, METRICS_NAME, RUN_NAME, attempts

SECONDS = {
    "step_s": "an iteration",
    "play_s": "episodes",
    "score_s": "probabilities before the updates",
    "update_s": "updates",
    "held_out_s": "held-out episodes",
    "inference_s": "inference",
    "waiting_s": "waiting",
    "simulation_s": "simulation",
    "rendering_s": "rendering",
}
# (title, axis, from zero, {what a line is called: its column and a factor})
CHARTS: tuple[tuple[str, str, bool, dict[str, tuple[str, float]]], ...] = (
    ("Success", "episodes / %", True, {"held out": ("held_out", 100), "while exploring": ("success", 100)}),
    ("Groups with different returns", "groups / %", True, {"": ("mixed_groups", 100)}),
    ("Divergence of an iteration’s updates", "KL", True, {"": ("kl", 1)}),
    ("Steps that the clip left without a gradient", "steps / %", True, {"": ("clipped", 100)}),
    ("Variance of the returns that the critic explains", "share", False, {"": ("explained_variance", 1)}),
    ("Gradient norm before clipping, mean", "gradient norm", True, {"": ("grad_norm", 1)}),
    ("Time of an iteration", "s", True, {"inference": ("inference_s", 1), "updates": ("update_s", 1),
                                        "waiting": ("waiting_s", 1)}),
)  # fmt: skip


def write_grpo_report(output_dir: Path) -> Path:
    """Write `OUTPUT_DIR/report.html` from what the run's folder holds."""
    config, facts = read_json(output_dir / CONFIG_NAME), read_json(output_dir / RUN_NAME)
    lines = [json.loads(line) for line in read_lines(output_dir / METRICS_NAME)]
    evaluation = read_json(output_dir / EVALUATION_NAME)
    done, total = lines[-1]["step"] if lines else 0, facts.get("steps")
    policy = facts.get("policy") or {}
    starts, failed = attempts(output_dir), sum(line.get("episodes_failed", 0) for line in lines)
    besides = f", of which {failed:,} could not be played and were left out" if failed else ""
    page = page_template("grpo.html").render(
        title=output_dir.name,
        subtitle=f"Iteration {done} of {total}, {lines[-1].get('episodes', 0) if lines else 0:,} episodes{besides}.",
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        closed_loop=closed_loop(evaluation, output_dir),
        held_out=[_held_out_row(line) for line in lines if line.get("held_out_episodes")],
        charts=_charts(
            columns([_with_share(line) for line in lines]), [attempt["resumed_from_step"] for attempt in starts[1:]]
        ),
        seconds=_seconds(lines),
        attempts=starts,
        facts=[
            ("Policy", figures.plain(str(policy.get("base", "")), 300)),
            ("Environment", figures.plain(f"{config.get('env_type')} {' '.join(config.get('env_options', []))}", 300)),
        ],
        plan=facts.get("plan"),
        config=json.dumps(config, indent=2),
    )
    return write_page(output_dir / REPORT_NAME, page)


def _with_share(line: Mapping[str, Any]) -> dict[str, Any]:
    episodes = line.get("held_out_episodes")
    return {**line, "held_out": line["held_out_successes"] / episodes if episodes else None}


def _held_out_row(line: Mapping[str, Any]) -> list[str]:
    score = {key.removeprefix("held_out_"): value for key, value in line.items()}
    return score_row({"label": str(line["step"]), **score})


def _charts(metrics: Metrics, marks: Sequence[float]) -> list[dict[str, str]]:
    charts = []
    for title, axis, from_zero, curves in CHARTS:
        lines = {}
        for name, (key, factor) in curves.items():
            values = metrics.get(key, np.zeros(0))
            is_finite = np.isfinite(values)
            if is_finite.any():  # held-out episodes are played at some iterations only
                lines[name] = metrics["step"][is_finite], factor * values[is_finite]
        if lines:
            chart = figures.line_chart(lines, xlabel="iteration", ylabel=axis, from_zero=from_zero, marks=marks)
            last = "; ".join(f"{name or title}: {y[0]:.3g} to {y[-1]:.3g}" for name, (_, y) in lines.items())
            charts.append({"title": title, "svg": figures.to_svg(chart, f"{title} over iterations. {last}, {axis}")})
    return charts


def _seconds(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    iterations = [line for line in lines if line["step"] > 0]
    return [
        [name, f"{np.mean([line.get(key, 0.0) for line in iterations]):.2f}"]
        for key, name in SECONDS.items()
        if iterations
    ]


if __name__ == "__main__":
    sys.exit(page.main(write=write_grpo_report, description=__doc__))
