"""A result of `profile_step` as a page that needs nothing else: the steps on a time line, and what they consist of."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diagnostics.profile_step import RankProfile, StepReport

COLOURS = {
    "data_wait": "#c0392b",
    "copy": "#e59866",
    "forward": "#2471a3",
    "backward": "#5dade2",
    "clip": "#76448a",
    "optimizer": "#af7ac5",
    "zero_grad_schedule": "#d2b4de",
    "metrics": "#b7950b",
    "checkpoint": "#7d6608",
    "other": "#aab7b8",
}
WIDTH, BAR, CHART = 960, 26, 220
STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 20px } h2 { font-size: 16px; margin-top: 2em } svg { width: 100%; height: auto }
pre { overflow-x: auto; background: #f6f7f8; padding: 1em; font-size: 12px; line-height: 1.45 }
.key { display: inline-block; margin-right: 1.2em; white-space: nowrap }
.key i { display: inline-block; width: 11px; height: 11px; margin-right: .4em }
"""


def page(report: StepReport, table: str) -> str:
    """HTML, UTF-8. `table`: the result as text, shown below the charts."""
    keys = "".join(f'<span class="key"><i style="background:{COLOURS[p]}"></i>{p}</span>' for p in report.phases)
    shares = [(phase, summary.share) for phase, summary in report.phases.items()]
    lines = "".join(
        f"<h2>Rank {rank.rank}: every timed step, in milliseconds</h2>{_time_line(rank)}" for rank in report.ranks
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Where a training step goes</title>'
        f"<style>{STYLE}</style><h1>Where a training step goes</h1><p>{html.escape(report.environment.line())}</p>"
        f"<h2>Shares</h2>{_bar(shares)}<p>{keys}</p>{lines}<pre>{html.escape(table)}</pre></html>\n"
    )


def _bar(shares: Sequence[tuple[str, float]]) -> str:
    """One bar, the whole width: a part for each share."""
    parts, x = [], 0.0
    for phase, share in shares:
        parts.append(_rectangle(phase, x, 0, share * WIDTH, BAR, f"{share:.1%}"))
        x += share * WIDTH
    return f'<svg viewBox="0 0 {WIDTH} {BAR}" role="img">{"".join(parts)}</svg>'


def _time_line(rank: RankProfile) -> str:
    """A column for each step, phases on top of each other, under a scale that reaches to the longest step."""
    exposed = rank.timed.exposed
    steps = len(next(iter(exposed.values())))
    longest = max(sum(seconds[i] for seconds in exposed.values()) for i in range(steps))
    width, parts = WIDTH / steps, []
    for i in range(steps):
        y = float(CHART)
        for phase, seconds in exposed.items():
            height = seconds[i] / longest * CHART
            y -= height
            parts.append(_rectangle(phase, i * width, y, 0.9 * width, height, f"step {i}: {1e3 * seconds[i]:.2f} ms"))
    scale = (
        f'<line x1="0" x2="{WIDTH}" y1="0.5" y2="0.5" stroke="#ccc"/>'
        f'<text x="{WIDTH}" y="14" text-anchor="end" font-size="12">{1e3 * longest:.1f} ms</text>'
    )
    return f'<svg viewBox="0 0 {WIDTH} {CHART}" role="img">{"".join(parts)}{scale}</svg>'


def _rectangle(phase: str, x: float, y: float, width: float, height: float, told: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{COLOURS[phase]}">'
        f"<title>{phase}, {told}</title></rect>"
    )
