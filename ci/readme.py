"""Write README.md from README.ipynb, and the images in it from the notebook as it was run.

    python ci/readme.py                     # write README.md
    python ci/readme.py --check             # exit status 1 when README.md is not what the notebook makes
    python ci/readme.py --images EXECUTED   # docs/images/ from the executed notebook, then README.md

Markdown cells are taken as they are. Of the code cells, those tagged `readme`: one that is also tagged `figure` as its
picture, docs/images/<cell id>.png (.webp if it moves), described by the comment that it begins with; another as its
code. In markdown, a line `<!-- output <cell id>: REGEX -->` becomes the lines that match of what the cell printed, kept
in docs/images/<cell id>.txt.
"""

from __future__ import annotations

import argparse
import base64
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK, README, IMAGES = "README.ipynb", "README.md", "docs/images"
HEADER = "<!-- Written by ci/readme.py from README.ipynb: edit that, then `make readme`. -->"
OUTPUT = re.compile(r"<!-- output ([\w-]+): (.+) -->")
# Figures are kept at twice the pixels that they are shown with, and in so many colours.
PIXELS_PER_POINT, COLOURS, GAP = 2, 64, 24


def render(notebook: nbformat.NotebookNode, root: Path) -> str:
    """README.md's text. Raises ValueError naming the cell and the file when an image or an output is missing."""
    parts = [HEADER]
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type == "markdown":
            parts.append(OUTPUT.sub(lambda found: _printed(root, *found.groups()), cell.source))
        elif {"readme", "figure"} <= set(tags):
            parts.append(_picture(root, cell))
        elif "readme" in tags:
            parts.append(f"```python\n{cell.source}\n```")
    return "\n\n".join(parts) + "\n"


def _picture(root: Path, cell: nbformat.NotebookNode) -> str:
    path = f"{IMAGES}/{cell.id}.webp"
    moves = (root / path).is_file()
    path = path if moves else f"{IMAGES}/{cell.id}.png"
    if not cell.source.startswith("# "):
        raise ValueError(f"cell {cell.id}: begin with a comment that says what the figure shows, for who cannot see it")
    shown = cell.source.splitlines()[0].removeprefix("# ").replace('"', "&quot;")
    with Image.open(_existing(root, path, cell.id)) as image:
        width = image.width if moves else image.width // PIXELS_PER_POINT
    return f'<img src="{path}" alt="{shown}" width="{width}">'


def _printed(root: Path, cell_id: str, pattern: str) -> str:
    """Matching lines as a block of code; `...` where others were between them."""
    lines = _existing(root, f"{IMAGES}/{cell_id}.txt", cell_id).read_text(encoding="utf-8").splitlines()
    chosen = [n for n, line in enumerate(lines) if re.search(pattern, line)]
    if not chosen:
        raise ValueError(f"{IMAGES}/{cell_id}.txt: no line matches {pattern!r}")
    block = []
    for before, n in zip([chosen[0] - 1, *chosen], chosen, strict=False):
        block += ["..."] * (n > before + 1) + [lines[n]]
    return "```\n" + "\n".join(block) + "\n```"


def _existing(root: Path, path: str, cell_id: str) -> Path:
    if not (root / path).is_file():
        raise ValueError(f"{path}, of cell {cell_id}, does not exist: run the notebook, then ci/readme.py --images it")
    return root / path


def keep_images(notebook: nbformat.NotebookNode, executed: nbformat.NotebookNode, root: Path) -> None:
    """Write docs/images/ from the executed notebook: what the README shows, and nothing else."""
    folder = root / IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    outputs = {cell.id: cell.outputs for cell in executed.cells if cell.cell_type == "code"}
    kept = {}
    for cell in notebook.cells:
        if {"readme", "figure"} <= set(cell.metadata.get("tags", [])):
            moving = [o.data["image/webp"] for o in outputs.get(cell.id, []) if "image/webp" in o.get("data", {})]
            if moving:
                kept[f"{cell.id}.webp"] = base64.b64decode(moving[0])
            else:
                kept[f"{cell.id}.png"] = _side_by_side(cell.id, outputs.get(cell.id, []))
        for name, _ in OUTPUT.findall(cell.source) if cell.cell_type == "markdown" else []:
            printed = "".join(o.text for o in outputs.get(name, []) if o.get("name") == "stdout")
            kept[f"{name}.txt"] = printed.replace(f"{root}/", "").encode()
    for path in folder.iterdir():
        path.unlink()
    for name, content in kept.items():
        (folder / name).write_bytes(content)


def _side_by_side(cell_id: str, outputs: Sequence[nbformat.NotebookNode]) -> bytes:
    """A cell's figures as one PNG on white: its dark ink must be read on any page."""
    found = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    if not found:
        raise ValueError(f"cell {cell_id} shows no figure: was the notebook run to its end?")
    figures = [Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA") for data in found]
    width = sum(figure.width for figure in figures) + GAP * (len(figures) - 1)
    sheet = Image.new("RGBA", (width, max(figure.height for figure in figures)), "white")
    left = 0
    for figure in figures:
        sheet.alpha_composite(figure, (left, 0))
        left += figure.width + GAP
    buffer = io.BytesIO()
    sheet.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 when README.md is stale")
    parser.add_argument("--images", type=Path, metavar="EXECUTED", help="the notebook that papermill has run")
    options = parser.parse_args(argv)
    notebook = nbformat.read(root / NOTEBOOK, as_version=4)
    try:
        if options.images is not None:
            keep_images(notebook, nbformat.read(options.images, as_version=4), root)
        text = render(notebook, root)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    readme = root / README
    if not options.check:
        readme.write_text(text, encoding="utf-8")
    elif not readme.is_file() or readme.read_text(encoding="utf-8") != text:
        print(f"{README} is not what {NOTEBOOK} makes: run `make readme`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
