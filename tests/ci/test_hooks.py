""".pre-commit-config.yaml: every hook is local, passes on this tree, and refuses its fault."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest
import yaml

from ci.check_lock import differences
from ci.check_sizes import LIMIT_BYTES
from ci.check_sizes import main as check_sizes
from ci.strip_notebooks import main as strip_notebooks

ROOT = Path(__file__).resolve().parents[2]
(REPO,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
SUFFIXES = {"python": {".py"}, "jupyter": {".ipynb"}}


def tracked():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_hooks_are_local():
    assert REPO["repo"] == "local"
    assert {hook["language"] for hook in REPO["hooks"]} == {"system"}


@pytest.mark.parametrize("hook", REPO["hooks"], ids=lambda hook: hook["id"])
def test_hook_passes_on_this_tree(hook):
    kinds = [*hook.get("types", []), *hook.get("types_or", [])]
    suffixes = set().union(*(SUFFIXES[kind] for kind in kinds))
    files = [name for name in tracked() if re.search(hook.get("files", ""), name)]
    files = [name for name in files if not kinds or Path(name).suffix in suffixes]
    assert files or hook["id"] == "notebooks-stripped", "no file ever triggers this hook"
    command = shlex.split(hook["entry"])
    if command[-1] != "--check" and "format" in command:
        command.append("--check")  # as in CI: a test rewrites nothing
    done = subprocess.run(
        command + (files if hook.get("pass_filenames", True) else []), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def notebook(path):
    book = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    book.cells = [
        nbformat.v4.new_markdown_cell("# Title"),
        nbformat.v4.new_code_cell("steps = 1", metadata={"tags": ["parameters"]}),
    ]
    nbformat.write(book, path)
    return book


def test_strip_notebooks_removes_outputs_and_run_metadata(tmp_path, capsys):
    path = tmp_path / "a.ipynb"
    clean = notebook(path)
    ran = notebook(path)
    ran.metadata["papermill"] = {"duration": 3}
    ran.cells[1].execution_count = 7
    ran.cells[1].metadata["execution"] = {"iopub.status.busy": "now"}
    ran.cells[1].outputs = [nbformat.v4.new_output("stream", text="hf_token")]
    nbformat.write(ran, path)
    assert strip_notebooks([str(path)]) == 1 and "add it again" in capsys.readouterr().out
    stripped = nbformat.read(path, as_version=4)
    for cell, original in zip(stripped.cells, clean.cells, strict=True):
        assert {k: v for k, v in cell.items() if k != "id"} == {k: v for k, v in original.items() if k != "id"}
    assert stripped.metadata == clean.metadata
    before = path.read_bytes()
    assert strip_notebooks([str(path)]) == 0 and path.read_bytes() == before, "a clean one is left alone"
    path.write_text("{")
    assert strip_notebooks([str(path)]) == 1
    assert "no notebook that can be read" in capsys.readouterr().err


def test_check_sizes_refuses_large_files(tmp_path, capsys):
    (tmp_path / "small").write_bytes(bytes(LIMIT_BYTES))
    (tmp_path / "large").write_bytes(bytes(LIMIT_BYTES + 1))
    assert check_sizes([str(tmp_path / "small"), str(tmp_path / "gone")]) == 0
    assert check_sizes([str(tmp_path / "small"), str(tmp_path / "large")]) == 1
    assert "large" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("torch==2.11.0", "torch==2.11.1", "torch is 2.11.1 in requirements.txt, 2.11.0 in requirements.lock"),
        ("torch==", "no-such-package==1.0\ntorch==", "no-such-package==1.0 is not in requirements.lock"),
        ("tqdm==", "#tqdm==", "tqdm has left requirements.txt"),
    ],
)
def test_outdated_lock_is_reported(tmp_path, old, new, message):
    for name in ("requirements.txt", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    assert differences(tmp_path) == []
    text = (tmp_path / "requirements.txt").read_text()
    assert text.count(old) == 1
    (tmp_path / "requirements.txt").write_text(text.replace(old, new))
    assert differences(tmp_path) == [message]
