"""A result as a page that needs nothing else: shares as a bar, seconds as columns, and the table."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

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
    "evaluation": "#d4ac0d",
    "other": "#aab7b8",
    # stages of the data engine
    "read": "#1e8449",
    "decode": "#2471a3",
    "convert": "#5dade2",
    "resize": "#76448a",
    "shuffle": "#b7950b",
    "prepare": "#af7ac5",
    "transfer": "#c0392b",
    "collate": "#e59866",
    # fates of parameters
    "unused": "#c0392b",
    "sometimes": "#e59866",
    "zero": "#b7950b",
    "frozen": "#aab7b8",
    "used": "#1e8449",
}
WIDTH, BAR, CHART = 960, 26, 220
STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 20px } h2 { font-size: 16px; margin-top: 2em } svg { width: 100%; height: auto }
pre { overflow-x: auto; background: #f6f7f8; padding: 1em; font-size: 12px; line-height: 1.45 }
.key { display: inline-block; margin-right: 1.2em; white-space: nowrap }
.key i { display: inline-block; width: 11px; height: 11px; margin-right: .4em }
"""


def page(title: str, measured_on: str, charts: Sequence[tuple[str, str]], table: str) -> str:
    """HTML, UTF-8. charts: titles, and what `shares` and `time_line` draw. table: the result as text, shown below."""
    drawn = "".join(f"<h2>{html.escape(name)}</h2>{svg}" for name, svg in charts)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><h1>{html.escape(title)}</h1><p>{html.escape(measured_on)}</p>"
        f"{drawn}<pre>{html.escape(table)}</pre></html>\n"
    )


def shares(parts: Mapping[str, float]) -> str:
    """One bar, the whole width: each part as large as its share of the sum; and what their colours mean."""
    drawn, x, whole = [], 0.0, sum(parts.values()) or 1.0
    for name, part in parts.items():
        drawn.append(_rectangle(name, x, 0, part / whole * WIDTH, BAR, f"{part / whole:.1%}"))
        x += part / whole * WIDTH
    keys = "".join(f'<span class="key"><i style="background:{_colour(name)}"></i>{name}</span>' for name in parts)
    return f'<svg viewBox="0 0 {WIDTH} {BAR}" role="img">{"".join(drawn)}</svg><p>{keys}</p>'


def time_line(seconds: Mapping[str, Sequence[float]]) -> str:
    """A column for each step: what it consists of on top of each other, under a scale that reaches to the longest."""
    steps = list(zip(*seconds.values(), strict=True))
    longest = max(map(sum, steps))
    width, parts = WIDTH / len(steps), []
    for i, step in enumerate(steps):
        y = float(CHART)
        for name, part in zip(seconds, step, strict=True):
            height = part / longest * CHART
            y -= height
            parts.append(_rectangle(name, i * width, y, 0.9 * width, height, f"step {i}: {1e3 * part:.2f} ms"))
    scale = (
        f'<line x1="0" x2="{WIDTH}" y1="0.5" y2="0.5" stroke="#ccc"/>'
        f'<text x="{WIDTH}" y="14" text-anchor="end" font-size="12">{1e3 * longest:.1f} ms</text>'
    )
    return f'<svg viewBox="0 0 {WIDTH} {CHART}" role="img">{"".join(parts)}{scale}</svg>'


def _colour(name: str) -> str:
    return COLOURS.get(name, "#2471a3")


def _rectangle(name: str, x: float, y: float, width: float, height: float, told: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{_colour(name)}">'
        f"<title>{name}, {told}</title></rect>"
    )
