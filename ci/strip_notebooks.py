"""Take outputs, execution counts and what tools leave in the metadata out of notebooks: git keeps what people wrote.

    python ci/strip_notebooks.py NOTEBOOK ...

Rewrites a notebook that has any of it and exits with 1, as a commit hook does; 0 when there was nothing to do.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat

# Of a notebook's metadata, what readers of it need; papermill, Jupyter and editors add the rest.
KEPT = ("kernelspec", "language_info")


def strip(path: Path) -> bool:
    """Strip the notebook at `path`; return whether it changed. Raises ValueError for a file that is not a notebook."""
    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception as error:
        raise ValueError(f"{path}: no notebook that can be read: {error}") from error
    before = nbformat.writes(notebook)
    notebook.metadata = nbformat.NotebookNode({key: notebook.metadata[key] for key in KEPT if key in notebook.metadata})
    for cell in notebook.cells:
        cell.metadata = nbformat.NotebookNode({k: v for k, v in cell.metadata.items() if k == "tags"})
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    after = nbformat.writes(notebook)
    if after != before:
        path.write_text(after + "\n", encoding="utf-8")
    return after != before


def main(argv: list[str]) -> int:
    status = 0
    for name in argv:
        try:
            if strip(Path(name)):
                print(f"{name}: stripped; add it again")
                status = 1
        except ValueError as error:
            print(error, file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
