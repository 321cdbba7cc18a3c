"""ci/smoke_notebook.sh and ci/check_notebook.py refuse incomplete runs of a notebook."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from ci.check_notebook import main as check_notebook
from ci.check_notebook import problems_after, problems_before

ROOT = Path(__file__).resolve().parents[2]
PARAMETERS = "preset = 'l4'\ndataset = policy = workers = steps = None\noutput_dir = 'outputs/run'"
DRAW = "from IPython.display import SVG, display\ndisplay(SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>'))"
RUN = (
    "import os, pathlib\n"
    "from vla_finetuning import environment  # the kernel works in the project's folder\n"
    "pathlib.Path(output_dir).mkdir()\n"
    "print('preset', preset, 'capped at', os.environ['MAX_TRAIN_STEPS'])"
)


def code(source, *tags):
    return v4.new_code_cell(source, metadata={"tags": list(tags)})


def notebook(*cells):
    """A stand-in for README.ipynb: the agreed parameters, a cell that works, a figure, and `cells`."""
    return v4.new_notebook(cells=[code(PARAMETERS, "parameters"), code(RUN), code(DRAW, "figure"), *cells])


def smoke(book, folder):
    """The script on `book`, as on a machine with a cluster and an old run: neither may matter."""
    (folder / "out" / "run").mkdir(parents=True)
    nbformat.write(book, folder / "in.ipynb")
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "NOTEBOOK": str(folder / "in.ipynb"),
        "OUTPUT_DIR": str(folder / "out"),
        "MAX_TRAIN_STEPS": "3",
        "IPYTHONDIR": str(folder / "ipython"),
    }
    done = subprocess.run(
        ["bash", str(ROOT / "ci" / "smoke_notebook.sh")], cwd=folder, env=environment, capture_output=True, text=True
    )
    return done, folder / "out" / "README.ipynb"


def printed(path):
    cells = nbformat.read(path, as_version=4).cells
    return "".join(o.get("text", "") for cell in cells if cell.cell_type == "code" for o in cell.outputs)


@pytest.mark.gate
def test_smoke_fails_on_cell_error_and_saves_the_notebook(tmp_path):
    done, executed = smoke(notebook(code("1 / 0"), code("print('after')")), tmp_path)
    assert done.returncode != 0 and "ZeroDivisionError" in done.stderr
    assert printed(executed) == "preset demo capped at 3\n" and (tmp_path / "out" / "run").is_dir()


def test_smoke_does_not_run_notebook_without_parameters(tmp_path):
    book = notebook()
    book.cells[0].source = "preset = 'demo'"
    done, executed = smoke(book, tmp_path)
    assert done.returncode != 0 and not executed.exists()
    assert "does not set dataset, output_dir, policy, steps, workers" in done.stderr


def test_check_notebook_requires_parameters_and_figures():
    for cells, problem in (
        ([code("", "figure")], "0 cells are tagged `parameters`"),
        ([code(PARAMETERS, "parameters")] * 2 + [code("", "figure")], "2 cells are tagged `parameters`"),
        ([code(PARAMETERS, "parameters")], "missing figures would go unnoticed"),
    ):
        assert problem in problems_before(v4.new_notebook(cells=cells))[0]
    assert problems_before(notebook()) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"execution_count": None}, "cell 3 was not run"),
        ({"outputs": []}, "cell 3, `figure`, shows none"),
        ({"outputs": [v4.new_output("display_data", data={"text/plain": "<Figure>"})]}, "cell 3, `figure`, shows none"),
    ],
)
def test_check_notebook_reports_missing_figures(change, problem):
    book = notebook(v4.new_markdown_cell("text"), code(""))
    for count, cell in enumerate(book.cells[:3], 1):
        cell.execution_count = count
    book.cells[2].outputs = [v4.new_output("display_data", data={"image/png": "iVBORw0="})]
    assert problems_after(book) == []
    book.cells[2].update(change)
    assert problems_after(book) == [problem]


def test_check_notebook_reports_error_outputs():
    book = notebook()
    book.cells[1].outputs = [v4.new_output("error", ename="ValueError", evalue="no", traceback=[])]
    assert "cell 2: ValueError: no" in problems_after(book)


def test_damaged_notebook_is_reported(tmp_path, capsys):
    (tmp_path / "a.ipynb").write_text("{")
    assert check_notebook([str(tmp_path / "a.ipynb")]) == 1
    assert "cannot be read" in capsys.readouterr().err
