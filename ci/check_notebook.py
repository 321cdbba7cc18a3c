"""Check a notebook before and after papermill, which passes over more than it should.

    python ci/check_notebook.py NOTEBOOK              # one cell tagged `parameters`, with all that can be set
    python ci/check_notebook.py --executed NOTEBOOK   # every cell ran without error, every figure is there

papermill only warns of a parameter that the notebook does not have. Cells that draw are tagged `figure`.
"""

from __future__ import annotations

import argparse
import ast
import sys

import nbformat

PARAMETERS = {"preset", "dataset", "policy", "workers", "steps", "output_dir"}
FIGURES = ("image/png", "image/svg+xml", "image/webp")


def tagged(notebook: nbformat.NotebookNode, tag: str) -> dict[int, nbformat.NotebookNode]:
    """{number, from 1: cell} of the cells with `tag`."""
    return {n: cell for n, cell in enumerate(notebook.cells, 1) if tag in cell.metadata.get("tags", [])}


def problems_before(notebook: nbformat.NotebookNode) -> list[str]:
    """Why this notebook cannot be run with parameters and judged."""
    found = []
    cells = tagged(notebook, "parameters")
    if len(cells) != 1:
        found.append(f"{len(cells)} cells are tagged `parameters`, expected one")
    for number, cell in cells.items():
        targets = [t for node in ast.parse(cell.source).body if isinstance(node, ast.Assign) for t in node.targets]
        named = {target.id for target in targets if isinstance(target, ast.Name)}
        if missing := PARAMETERS - named:
            found.append(f"cell {number}, `parameters`, does not set {', '.join(sorted(missing))}")
    if not tagged(notebook, "figure"):
        found.append("no cell is tagged `figure`: missing figures would go unnoticed")
    return found


def problems_after(notebook: nbformat.NotebookNode) -> list[str]:
    """Cells that did not run, failed, or drew nothing where there should be a figure."""
    found = []
    figures = tagged(notebook, "figure")
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type != "code":
            continue
        if cell.source.strip() and cell.execution_count is None:
            found.append(f"cell {number} was not run")
        found += [f"cell {number}: {o.ename}: {o.evalue}" for o in cell.outputs if o.output_type == "error"]
        drawn = any(output.get("data", {}).get(kind) for output in cell.outputs for kind in FIGURES)
        if number in figures and not drawn:
            found.append(f"cell {number}, `figure`, shows none")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check a notebook before (or, with --executed, after) papermill.")
    parser.add_argument("notebook")
    parser.add_argument("--executed", action="store_true")
    options = parser.parse_args(argv)
    try:
        notebook = nbformat.read(options.notebook, as_version=4)
    except (OSError, ValueError) as error:  # a damaged notebook is a ValueError of nbformat's
        print(f"{options.notebook}: cannot be read: {error}", file=sys.stderr)
        return 1
    found = problems_after(notebook) if options.executed else problems_before(notebook)
    for problem in found:
        print(f"{options.notebook}: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
