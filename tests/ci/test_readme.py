"""ci/readme.py: a page made from a notebook, and the pictures in it from a run of it."""

import base64
import io
import re
from pathlib import Path

import nbformat
import pytest
from nbformat import v4
from PIL import Image

from ci.readme import main


def png(size, colour=(0, 0, 0, 0)):
    buffer = io.BytesIO()
    Image.new("RGBA", size, colour).save(buffer, "PNG")
    return v4.new_output("display_data", data={"image/png": base64.b64encode(buffer.getvalue()).decode()})


def webp(size, *colours):
    buffer = io.BytesIO()
    first, *others = [Image.new("RGB", size, colour) for colour in colours]
    first.save(buffer, "WEBP", save_all=True, append_images=others, duration=100)
    return v4.new_output("display_data", data={"image/webp": base64.b64encode(buffer.getvalue()).decode()})


def code(cell_id, source, *tags, outputs=()):
    return v4.new_code_cell(source, id=cell_id, metadata={"tags": list(tags)}, outputs=list(outputs))


@pytest.fixture
def project(tmp_path):
    """A notebook, and the same one executed: it prints, draws twice in one cell, and draws what no page shows."""
    text = f"plan in {tmp_path}/outputs\nstep 1  loss 3\nstep 2  loss 2\nstep 3  loss 1\n"
    cells = [
        v4.new_markdown_cell("# Title\n\n<!-- output train: step [13] -->", id="title"),
        code("train", "train()", outputs=[v4.new_output("stream", text=text)]),
        code("load", "load()", "readme"),
        code("pair", '# Loss, and "lr"\ndraw()', "figure", "readme", outputs=[png((20, 10)), png((10, 30), "red")]),
        code("other", "# Other\ndraw()", "figure", outputs=[png((5, 5))]),
        code("film", "# It moves\ndraw()", "figure", "readme", outputs=[webp((12, 6), "red", "blue")]),
    ]
    nbformat.write(v4.new_notebook(cells=cells), tmp_path / "executed.ipynb")
    for cell in cells:
        if cell.cell_type == "code":
            cell.outputs = []
    nbformat.write(v4.new_notebook(cells=cells), tmp_path / "README.ipynb")
    return tmp_path


def test_a_page_from_a_run(project):
    (project / "docs" / "images").mkdir(parents=True)
    (project / "docs" / "images" / "old.png").touch()
    assert main(["--images", str(project / "executed.ipynb")], project) == 0
    page = (project / "README.md").read_text()
    assert page.split("\n\n", 1)[1] == (
        "# Title\n\n```\nstep 1  loss 3\n...\nstep 3  loss 1\n```\n\n```python\nload()\n```\n\n"
        '<img src="docs/images/pair.png" alt="Loss, and &quot;lr&quot;" width="27">\n\n'
        '<img src="docs/images/film.webp" alt="It moves" width="12">\n'
    )
    images = project / "docs" / "images"
    assert sorted(path.name for path in images.iterdir()) == ["film.webp", "pair.png", "train.txt"]
    with Image.open(images / "film.webp") as film:
        assert film.n_frames == 2
    assert str(project) not in (images / "train.txt").read_text()
    picture = Image.open(images / "pair.png").convert("RGB")
    assert picture.size == (20 + 24 + 10, 30)
    assert picture.getpixel((0, 0)) == (255, 255, 255) and picture.getpixel((53, 29)) == (255, 0, 0)
    assert main(["--check"], project) == 0


def test_a_stale_page_is_noticed_and_left_alone(project, capsys):
    assert main(["--images", str(project / "executed.ipynb")], project) == 0
    book = nbformat.read(project / "README.ipynb", as_version=4)
    book.cells[0].source += "\n\nMore."
    nbformat.write(book, project / "README.ipynb")
    before = (project / "README.md").read_text()
    assert main(["--check"], project) == 1 and "make readme" in capsys.readouterr().err
    assert (project / "README.md").read_text() == before
    assert main([], project) == 0 and "More." in (project / "README.md").read_text()


def test_what_is_missing_is_named(project, capsys):
    assert main([], project) == 1
    assert "docs/images/train.txt, of cell train, does not exist" in capsys.readouterr().err
    executed = nbformat.read(project / "executed.ipynb", as_version=4)
    executed.cells[3].outputs = []
    nbformat.write(executed, project / "half.ipynb")
    assert main(["--images", str(project / "half.ipynb")], project) == 1
    assert "cell pair shows no figure" in capsys.readouterr().err
    assert not (project / "README.md").exists()
    book = nbformat.read(project / "README.ipynb", as_version=4)
    book.cells[0].source = book.cells[0].source.replace("step [13]", "epoch")
    nbformat.write(book, project / "README.ipynb")
    assert main(["--images", str(project / "executed.ipynb")], project) == 1
    assert "no line matches 'epoch'" in capsys.readouterr().err


def test_every_test_that_a_page_names_is_there():
    """Files, and what is in them."""
    root = Path(__file__).resolve().parents[2]
    defined = {
        str(path.relative_to(root)): set(re.findall(r"^def (test_\w+)", path.read_text(), flags=re.MULTILINE))
        for path in (root / "tests").rglob("test_*.py")
    }
    named = 0
    for page in (root / "README.md", *(root / "docs").glob("*.md")):
        for file, test in re.findall(r"((?:tests/)?[\w/]*\btest_\w+\.py)(?:::(test_\w+))?", page.read_text()):
            assert file in defined and (not test or test in defined[file]), f"{page.name}: {file}::{test}"
            named += 1
        for test in re.findall(r"`(test_\w+)`", page.read_text()):
            assert any(test in tests for tests in defined.values()), f"{page.name}: {test}"
            named += 1
    assert named > 60
