"""Figures of the page and the notebook, as matplotlib drew them."""

import re

import numpy as np
import pytest
from matplotlib.figure import Figure

from vla_finetuning.report import figures
from vla_finetuning.report.dataset_look import Moment


def test_long_lines_are_thinned_with_extremes():
    x = np.arange(200_000.0)
    y = np.sin(x / 500)
    y[123_456], y[77] = 9.0, np.nan
    figure = figures.line_chart({"loss": (x, y)}, xlabel="step", ylabel="loss")
    (line,) = figure.axes[0].lines
    assert isinstance(figure, Figure) and len(line.get_xdata()) <= figures.MAX_POINTS + 2
    assert line.get_xdata()[np.nanargmax(line.get_ydata())] == 123_456
    assert np.nanmin(line.get_ydata()) == np.nanmin(y)
    assert (line.get_xdata()[0], line.get_xdata()[-1]) == (0, 199_999)


def test_svg_uses_page_colours_and_no_fonts():
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
def test_units_are_parsed_from_name_suffix(name, unit):
    assert figures.with_unit(name) == name + (f" ({unit})" if unit else "")


def test_contact_sheet_has_row_per_camera_with_gaps():
    red, wide = np.full((6, 6, 3), (255, 0, 0), np.uint8), np.zeros((4, 8, 3), np.uint8)
    moments = [
        Moment(0, 0.0, {"observation.images.top": red, "wrist": wide}),
        Moment(0, 1.25, {"observation.images.top": red}),
    ]
    figure = figures.contact_sheet(moments)
    shown = [[axes.images[0].get_array() for axes in figure.axes[i : i + 2] if axes.images] for i in (0, 2)]
    assert [len(row) for row in shown] == [2, 1]
    assert (shown[0][1] == red).all() and (shown[1][0] == wide).all()
    assert [axes.get_ylabel() for axes in figure.axes] == ["top", "", "wrist", ""]
    assert [axes.get_title("center") for axes in figure.axes[:2]] == ["0.0 s", "1.2 s"]
    assert figures.contact_sheet([]).axes == []


def test_dimension_without_range_is_labelled_and_empty():
    scaled = np.array([[np.nan, np.nan, np.nan], [-1.0, 0.0, 99.0]])
    (axes,) = figures.ranges(scaled, ["flat", "b"], limit=5).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["flat", "b"]
    assert {tuple(text.xy) for text in axes.texts} == {(5.75, 1)} and axes.texts[0].get_text() == "99"
    assert figures.ranges(scaled[:1], ["flat"], limit=5).axes[0].lines[0].get_xdata().size == 0


@pytest.mark.parametrize("high", [2.5, 4e5])
def test_log_axis_has_plain_number_labels(high):
    figure = figures.line_chart({"loss": ([1, 2], [high, 1.1])}, xlabel="step", ylabel="loss", log=True)
    figure.canvas.draw()
    axis, limits = figure.axes[0].yaxis, figure.axes[0].get_ylim()
    labels = [label.get_text() for label in axis.get_ticklabels() + axis.get_minorticklabels() if label.get_text()]
    assert 1 <= sum(limits[0] <= float(label) <= limits[1] for label in labels) <= 8


def test_bars_match_counts_and_labels():
    figure = figures.bars([("pick up $x$", 12), ("wipe", 3)], xlabel="episodes")
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [12, 3]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["pick up $x$", "wipe"]
    assert axes.yaxis_inverted()


def test_single_point_has_only_its_own_ticks():
    axes = figures.line_chart({"loss": (np.array([20]), np.array([0.5]))}, xlabel="step", ylabel="loss").axes[0]
    assert axes.get_xticks().tolist() == [20] and axes.get_yticks().tolist() == [0.5]
