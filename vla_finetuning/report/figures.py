"""Draw the charts of reports: functions take arrays and return matplotlib figures.

A notebook shows the figures as they are. `to_svg` converts one for a page: text stays text, colours become the page's
CSS variables (light and dark), and nothing is loaded from elsewhere. Figures are small, so that pages can set them side
by side.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import itertools
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from PIL import Image

if TYPE_CHECKING:
    from vla_finetuning.report.dataset_look import Moment

# The colours of figures, and the CSS variable that replaces each of them in a page.
INK, MUTED, GRID = "#1f2430", "#667085", "#dfe3ea"
BLUE, ORANGE, RED = "#1d5fd1", "#c2570c", "#c01d2e"
CSS_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", BLUE: "--blue", ORANGE: "--orange", RED: "--red"}

WIDTH, HEIGHT = 4.1, 2.4  # inches
STRIP_HEIGHT = 0.76
IMAGE_WIDTH = 1.6
MAX_POINTS = 1_000  # of a line: a screen shows no more
JPEG_WIDTH, JPEG_QUALITY = 240, 78
UNITS = ("cm", "mm", "m", "rad", "deg", "s", "hz", "m_s", "rad_s", "deg_s")

_STYLE: dict[Any, Any] = {
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "font.size": 9,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "text.color": INK,
    # Names of joints and cameras may contain `$`, which must not be parsed as a formula.
    "text.parse_math": False,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "vla",
}


class Chunk(NamedTuple):
    """Recorded and predicted actions from one frame on, float (T, A) each, NaN where padded."""

    title: str
    recorded: np.ndarray
    predicted: np.ndarray


def example_chunk(example: Mapping[str, Any]) -> Chunk:
    """Convert an example of `evaluation.open_loop` for `chunk_strips`."""
    padded = np.asarray(example["is_pad"], bool)[:, None]
    recorded, predicted = (
        np.where(padded, np.nan, np.asarray(example[k], np.float64)) for k in ("recorded", "predicted")
    )
    has_place = "episode_index" in example
    title = f"episode {example['episode_index']}, frame {example['frame_index']}" if has_place else ""
    return Chunk(title, recorded, predicted)


@contextlib.contextmanager
def _styled() -> Iterator[None]:
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # Missing glyphs do not matter: matplotlib's font only serves to estimate widths.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


@contextlib.contextmanager
def _chart(xlabel: str, ylabel: str = "", height: float = HEIGHT) -> Iterator[tuple[Figure, Axes]]:
    with _styled():
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.add_subplot()
        axes.set_xlabel(plain(xlabel))
        axes.set_ylabel(plain(ylabel))
        yield figure, axes


def line_chart(
    lines: Mapping[str, tuple[np.ndarray, np.ndarray]],
    *,
    xlabel: str,
    ylabel: str,
    log: bool = False,
    from_zero: bool = False,
    marks: Sequence[float] = (),
) -> Figure:
    """Draw lines, `{name: (x, y)}`, and vertical lines at `marks`. Values that are not finite leave a gap.

    Up to nine lines have distinct styles; a single line has no legend.
    """
    below = len(lines) > 3  # the legend's place
    with _chart(xlabel, ylabel, HEIGHT + 0.18 * below * len(lines)) as (figure, axes):
        styles = itertools.cycle(itertools.product(("-", "--", ":"), (BLUE, ORANGE, INK)))
        for (name, (x, y)), (linestyle, colour) in zip(lines.items(), styles, strict=False):
            x, y = _thin(x, y)
            marker = "o" if len(x) < 3 else None
            axes.plot(x, y, linestyle, color=colour, label=plain(name, 40), marker=marker, markersize=3, clip_on=False)
        for mark in marks:
            axes.axvline(mark, color=RED, linewidth=1, linestyle=(0, (3, 3)))
        if from_zero:
            axes.set_ylim(0, None if any(np.nanmax(y, initial=0) > 0 for _, y in lines.values()) else 1)
        if log:
            # matplotlib's labels of a logarithmic axis are formulas.
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5) if high < 30 * low else (1,)))
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(_short_number)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        # A single point gets its own ticks only.
        positions = np.unique(np.concatenate([x for x, _ in lines.values()] or [np.zeros(0)]))
        if len(positions) == 1:
            axes.set_xticks(positions)
            axes.set_yticks(np.unique([float(v) for _, y in lines.values() for v in y if np.isfinite(v)]))
        if below:
            figure.legend(loc="outside lower left")
        elif len(lines) > 1:
            axes.legend()
        return figure


def interval_chart(
    x: np.ndarray, y: np.ndarray, low: np.ndarray, high: np.ndarray, *, xlabel: str, ylabel: str
) -> Figure:
    """Draw percentages with their intervals, (N,) each, over x."""
    style: dict[str, Any] = {"color": BLUE, "ecolor": MUTED, "elinewidth": 1.2, "capsize": 3, "marker": "o"}
    with _chart(xlabel, ylabel) as (figure, axes):
        axes.errorbar(x, y, np.maximum(0, [y - low, high - y]), **style, markersize=3.5, clip_on=False)
        axes.set_ylim(0, 100)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if len(x) == 1:
            axes.set_xticks(x)
        return figure


def histogram(values: np.ndarray, *, xlabel: str, ylabel: str) -> Figure:
    """Draw a histogram of values (N,) with at most 24 bins."""
    with _chart(xlabel, ylabel) as (figure, axes):
        axes.hist(values, bins=max(1, min(24, len(np.unique(values)))), color=BLUE, rwidth=0.9)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        return figure


def _label_rows(axes: Axes, names: Sequence[str], top: float) -> None:
    """Label each row with a name, the first on top, and draw a vertical grid."""
    axes.set_yticks(range(len(names)), [plain(name, 32) for name in names])
    axes.set_ylim(len(names) - 0.4, top)
    axes.grid(True, axis="x")
    axes.grid(False, axis="y")


def bars(counts: Sequence[tuple[str, float]], *, xlabel: str) -> Figure:
    """Draw (name, count) pairs as horizontal bars with their counts, the first on top."""
    with _chart(xlabel, height=0.75 + 0.24 * len(counts)) as (figure, axes):
        rectangles = axes.barh(range(len(counts)), [count for _, count in counts], color=BLUE)
        axes.bar_label(rectangles, fmt="{:,g}", padding=3)
        axes.margins(x=0.12)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        _label_rows(axes, [name for name, _ in counts], -0.6)
        return figure


def stack(parts: Mapping[str, np.ndarray], *, xlabel: str, ylabel: str) -> Figure:
    """Draw the values (N,) of each part stacked over 0 to N - 1."""
    with _chart(xlabel, ylabel) as (figure, axes):
        positions = np.arange(len(next(iter(parts.values()))))
        axes.stackplot(positions, *parts.values(), labels=[plain(name) for name in parts], step="mid")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), reverse=True)
        return figure


def contact_sheet(moments: Sequence[Moment]) -> Figure:
    """Draw a row for each camera and a column for each moment. Images keep their aspect ratio."""
    cameras = list(dict.fromkeys(key for moment in moments for key in moment.images))
    # All images have one width, so the height of a row depends on its camera.
    shapes = [next(m.images[key] for m in moments if key in m.images).shape for key in cameras]
    heights = [IMAGE_WIDTH * height / width for height, width, _ in shapes]
    with _styled():
        size = (IMAGE_WIDTH * len(moments) + 0.3, sum(heights) + 0.35)
        figure = Figure(figsize=size, layout="constrained")
        if not cameras:
            return figure
        grid = figure.subplots(len(cameras), len(moments), squeeze=False, height_ratios=heights)
        for axes, key in zip(grid[:, 0], cameras, strict=True):
            axes.set_ylabel(_shorten(plain(key.removeprefix("observation.images."))))
        for axes, moment in zip(grid[0], moments, strict=True):
            axes.set_title(f"{moment.time_s:.1f} s", loc="center")
        for (row, column), axes in np.ndenumerate(grid):
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
            if cameras[row] in moments[column].images:
                axes.imshow(moments[column].images[cameras[row]])
        return figure


def strips(time_s: np.ndarray, values: np.ndarray, names: Sequence[str]) -> Figure:
    """Draw each dimension of a feature, (N, D), over time in seconds, (N,), as a strip with its name and unit."""
    with _styled():
        rows = _strips(len(names), 1)
        for axes, name, column in zip(rows.axes, names, values.T, strict=True):
            axes.plot(*_thin(time_s, column), color=BLUE, linewidth=1.3)
            axes.set_title(with_unit(name))
        rows.axes[-1].set_xlabel("time in the episode / s")
        return rows


def chunk_strips(
    chunks: Sequence[Chunk], names: Sequence[str], fps: float, xlabel: str = "time from the observed frame / s"
) -> Figure:
    """Draw recorded and predicted action chunks: a row for each of the A dimensions, a column for each chunk."""
    with _styled():
        figure = _strips(len(names), len(chunks), legend_height=0.3)
        for i, axes in enumerate(figure.axes):
            dimension, chunk = i // len(chunks), chunks[i % len(chunks)]
            time_s = np.arange(len(chunk.recorded)) / fps
            axes.plot(time_s, chunk.recorded[:, dimension], color=MUTED, linewidth=2.4, label="recorded")
            axes.plot(time_s, chunk.predicted[:, dimension], color=ORANGE, linewidth=1.4, label="predicted")
            if chunk is chunks[0]:
                axes.set_title(with_unit(names[dimension]))
            if dimension == len(names) - 1:
                axes.set_xlabel(plain(chunk.title))
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
        figure.supxlabel(plain(xlabel), fontsize=9)
        return figure


def ranges(scaled: np.ndarray, names: Sequence[str], *, limit: float) -> Figure:
    """Draw the ranges of D dimensions on the scale where q01 is -1 and q99 is 1.

    Args:
        scaled: minimum, mean and maximum of each dimension, float (D, 3); dimensions with NaN are named and left empty.
        limit: values beyond are outliers, which are marked at the edge with their value.
    """
    has_range = np.isfinite(scaled).all(axis=1)
    widest = float(np.abs(scaled[has_range]).max(initial=0))
    edge = 1.15 * limit if widest > limit else max(1.5, 1.1 * widest)
    with _chart("normalised value (q01 = −1, q99 = 1)", height=0.75 + 0.24 * len(names)) as (figure, axes):
        y = np.arange(len(names))[has_range]
        scaled = scaled[has_range]
        minimum, mean, maximum = np.clip(scaled, -edge, edge).T
        axes.hlines(y, minimum, maximum, color=MUTED, linewidth=1.2)
        axes.hlines(y, -1, 1, color=BLUE, linewidth=6, alpha=0.9)
        axes.plot(mean, y, "o", color=INK, markersize=3.5)
        for column, marker, align, sign in ((0, "<", "left", -1), (2, ">", "right", 1)):
            out = np.abs(scaled[:, column]) > limit
            axes.plot(np.full(out.sum(), sign * edge), y[out], marker, color=RED, markersize=6, clip_on=False)
            label: dict[str, Any] = {"xytext": (-6 * sign, 5), "textcoords": "offset points", "ha": align}
            for row, value in zip(y[out], scaled[out, column], strict=True):
                axes.annotate(f"{value:.3g}", (sign * edge, row), **label, color=RED, fontsize=8)
        axes.set_xlim(-edge, edge)
        _label_rows(axes, [_shorten(plain(name)) for name in names], -0.8)
        return figure


def with_unit(name: str) -> str:
    """Format a dimension's name with the unit at its end (`x_cm`, `elbow.deg`), if it has one: `x_cm (cm)`."""
    match = re.search(rf"[_.\s(\[]({'|'.join(UNITS)})[)\]]?$", name.lower())
    return plain(name, 40) + (f" ({match[1].replace('_', '/')})" if match else "")


def plain(text: str, limit: int = 80) -> str:
    """Put untrusted text on one line of at most `limit` characters, without unprintable characters."""
    text = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(str(text).split()))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def to_svg(figure: Figure, label: str) -> str:
    """Convert a figure to an `<svg>` element with the page's font and colours, and `label` for screen readers."""
    buffer = io.StringIO()
    with _styled():
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    root = ElementTree.fromstring(svg)
    # A page has several figures: referenced ids get a prefix per figure, other ids are removed.
    prefix = f"f{hashlib.sha256(svg.encode()).hexdigest()[:8]}-"
    used = set(re.findall(r'(?:url\(|href=")#([\w.-]+)', svg))
    for parent in list(root.iter()):
        for child in [child for child in parent if child.tag.endswith(("}metadata", "}style"))]:
            parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        attributes = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        element.attrib.clear()
        for name, value in attributes.items():
            if name == "id":
                if value in used:
                    element.set(name, prefix + value)
            elif name == "href":
                element.set(name, f"#{prefix}{value[1:]}")
            else:
                element.set(name, _themed(value).replace("url(#", f"url(#{prefix}"))
    width = float(root.attrib.pop("width").removesuffix("pt")) * 4 / 3
    for name in ("height", "version"):
        del root.attrib[name]
    root.set("role", "img")
    root.set("aria-label", plain(label, 300))
    root.set("style", f"max-width: {width:.0f}px; stroke-linejoin: round")
    return ElementTree.tostring(root, encoding="unicode")


def to_data_uri(image: np.ndarray, most_width: int = JPEG_WIDTH) -> str:
    """Encode an image, uint8 (H, W, 3), as a small JPEG in a `data:` URI."""
    height, width = image.shape[:2]
    picture = Image.fromarray(image)
    if width > most_width:
        picture = picture.resize((most_width, max(1, round(height * most_width / width))), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=JPEG_QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def _strips(rows: int, columns: int, legend_height: float = 0.0) -> Figure:
    """Make a grid of small axes. Axes of a row share y, axes of a column share x."""
    figure = Figure(figsize=(WIDTH, 0.5 + legend_height + STRIP_HEIGHT * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharex="col", sharey="row", squeeze=False)
    for axes in grid.flat:
        axes.yaxis.set_major_locator(MaxNLocator(2))
        axes.yaxis.set_major_formatter(_short_number)
        axes.xaxis.set_major_locator(MaxNLocator(6 if columns == 1 else 2))
        axes.tick_params(labelsize=8)
    return figure


def _thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reduce a line to about MAX_POINTS points, keeping the extremes of every stretch."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    y = np.where(np.isfinite(y), y, np.nan)
    if len(x) <= MAX_POINTS:
        return x, y
    extremes = [np.array([0, len(x) - 1])]
    for stretch in np.array_split(np.arange(len(x)), MAX_POINTS // 2):
        if np.isfinite(y[stretch]).any():
            extremes.append(stretch[[np.nanargmin(y[stretch]), np.nanargmax(y[stretch])]])
    chosen = np.unique(np.concatenate(extremes))
    return x[chosen], y[chosen]


def _short_number(value: float, _: float) -> str:
    return f"{value:g}".replace("-", "\N{MINUS SIGN}")


def _shorten(name: str, limit: int = 22) -> str:
    return name if len(name) <= limit else "…" + name[1 - limit :]


def _themed(style: str) -> str:
    for colour, variable in CSS_VARIABLES.items():
        style = style.replace(colour, f"var({variable})")
    return re.sub(r"font-family: [^;]*; ?", "", style)
