"""Figures as a page and a notebook use them."""

import re

import numpy as np
import pytest
from matplotlib.figure import Figure

import figures


def test_long_lines_are_thinned_and_keep_their_extremes():
    x = np.arange(200_000.0)
    y = np.sin(x / 500)
    y[123_456], y[77] = 9.0, np.nan
    figure = figures.line_chart({"loss": (x, y)}, xlabel="step", ylabel="loss")
    (line,) = figure.axes[0].lines
    assert isinstance(figure, Figure) and len(line.get_xdata()) <= figures.MAX_POINTS + 2
    assert line.get_xdata()[np.nanargmax(line.get_ydata())] == 123_456
    assert np.nanmin(line.get_ydata()) == np.nanmin(y)
    assert (line.get_xdata()[0], line.get_xdata()[-1]) == (0, 199_999)


def test_svg_takes_every_colour_from_the_page_and_no_font():
    chunks = [figures.Chunk("episode 1", np.zeros((4, 2)), np.ones((4, 2)))]
    drawn = [
        figures.line_chart({"a": ([1, 2], [3, 4]), "b": ([1, 2], [4, 3])}, xlabel="x", ylabel="y", marks=[1.5]),
        figures.histogram(np.array([1, 2, 2.5]), xlabel="x", ylabel="y"),
        figures.chunk_strips(chunks, ["x_cm", "b"], fps=10),
        figures.ranges(np.array([[-1.5, 0, 1], [-1, 0, 99]]), ["a", "b"], limit=5),
    ]
    for figure in drawn:
        svg = figures.to_svg(figure, "what it shows")
        assert set(re.findall(r"var\((--\w+)\)", svg)) <= set(figures.CSS_VARIABLES.values())
        assert re.findall(r"#[0-9a-fA-F]{6}\b", re.sub(r"#f[0-9a-f]{8}-", "", svg)) == []
        assert "font-family" not in svg and "<style" not in svg and "<text" in svg
        referred = set(re.findall(r'(?:url\(|href=")#([^)"]+)', svg))
        assert referred and referred == set(re.findall(r' id="([^"]+)"', svg))


@pytest.mark.parametrize(
    ("name", "unit"),
    [("x_cm", "cm"), ("elbow.deg", "deg"), ("speed_m_s", "m/s"), ("Angle (rad)", "rad"), ("arm", None), ("pos", None)],
)
def test_units_are_those_that_names_end_with(name, unit):
    assert figures.unit_of(name) == unit


def test_images_become_small_jpegs():
    wide = figures.to_data_uri(np.zeros((480, 640, 3), np.uint8))
    assert wide.startswith("data:image/jpeg;base64,") and len(wide) < 3_000
