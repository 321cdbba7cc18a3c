"""`make setup` repeats nothing and reports failures; the lock agrees with requirements.txt."""

import importlib.metadata
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ci.check_lock import direct_pins, locked, requirement_lines

ROOT = Path(__file__).resolve().parents[2]
SETUP_FILES = ("Makefile", "requirements.lock", ".python-version", "ci/setup.sh")


def test_lock_has_a_hash_for_every_package():
    packages = locked()
    assert len(packages) > len(direct_pins())
    assert [name for name, (_, hashes, _) in packages.items() if not hashes] == []


def test_lock_names_no_host_and_no_index():
    lock = (ROOT / "requirements.lock").read_text()
    assert "://" not in lock
    for line in lock.splitlines():
        assert re.match(r"[\w.-]+==\S+( ; .+)? \\$|    --hash=sha256:\w+( \\)?$| *#", line), line


def test_every_requirement_has_a_reason():
    for line in requirement_lines(ROOT / "requirements.txt"):
        reason = line.partition("#")[2]
        assert len(reason.split()) >= 3, f"no reason given: {line}"


def imported_names():
    """{top-level name: a file that imports it}, without the standard library and our own modules."""
    folders = [ROOT / name for name in ("vla_finetuning", "ci", "tests", "diagnostics", "benchmarks")]
    own = {path.stem for path in ROOT.iterdir()}
    names = {}
    for path in itertools.chain(ROOT.glob("*.py"), *(folder.rglob("*.py") for folder in folders)):
        imported = re.findall(r"^ *(?:from|import) (\w+)", path.read_text(), flags=re.MULTILINE)
        names.update(dict.fromkeys(imported, path.name))
    return {name: file for name, file in names.items() if name not in sys.stdlib_module_names | own}


def test_imported_packages_are_direct_dependencies():
    installed = importlib.metadata.packages_distributions()
    optional = [line for path in ROOT.glob("requirements-*.txt") for line in requirement_lines(path)]
    pins = direct_pins().keys() | {canonicalize_name(Requirement(line.partition("#")[0]).name) for line in optional}
    undeclared = {
        name: file
        for name, file in imported_names().items()
        if name in installed and not any(canonicalize_name(package) in pins for package in installed[name])
    }
    assert undeclared == {}, "imported, but requirements.txt does not name the package"


@pytest.fixture
def checkout(tmp_path):
    """What set-up reads, copied to a folder, with a PATH that holds no Python."""
    for name in SETUP_FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for tool in ("make", "sh", "dirname", "cut", "awk", "sed", "tail", "df", "rm", "touch", "mkdir", "cp"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    return tmp_path


def stub_python(checkout):
    """A python3.12 on that PATH that makes venvs, and whose `-m pip install` and `-m uv` fail."""
    stub = checkout / "bin" / "python3.12"
    stub.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '*sys.executable*) echo "$0 3.12.0" ;;\n'
        "*version_info*) echo 3.12 ;;\n"
        '"-m venv"*) mkdir -p .venv/bin; touch .venv/pyvenv.cfg; cp "$0" .venv/bin/python ;;\n'
        '"-m pip install"* | "-m uv"*) echo no network >&2; exit 1 ;;\n'
        "esac\n"
    )
    stub.chmod(0o755)


def make(checkout, *arguments):
    environment = {"PATH": str(checkout / "bin"), "HOME": str(checkout), "LC_ALL": "C"}
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 60}
    return subprocess.run([shutil.which("make"), *arguments], cwd=checkout, env=environment, **options)


def complete_venv(checkout):
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").touch()
    (checkout / ".venv" / ".complete").touch()
    past = (checkout / ".venv" / ".complete").stat().st_mtime - 10
    for path in [*SETUP_FILES, ".venv/bin/python"]:
        os.utime(checkout / path, (past, past))


def test_setup_is_repeated_only_after_changes(checkout):
    complete_venv(checkout)
    assert "Nothing to be done for 'setup'" in make(checkout, "-n", "setup").stdout
    for changed in ("requirements.lock", ".python-version", "ci/setup.sh"):
        assert "ci/setup.sh" in make(checkout, "-n", "setup", "-W", changed).stdout


@pytest.mark.parametrize("missing", [".venv/.complete", ".venv/bin/python"])
def test_incomplete_venv_is_set_up_again(checkout, missing):
    complete_venv(checkout)
    (checkout / missing).unlink()
    assert "ci/setup.sh" in make(checkout, "-n", "test").stdout


def test_missing_python_is_reported_with_its_remedy(checkout):
    done = make(checkout, "setup")
    assert done.returncode != 0
    assert "Python 3.12 is missing" in done.stderr
    assert "pyenv install 3.12" in done.stderr
    assert not (checkout / ".venv").exists()


def test_failed_installation_is_reported_and_leaves_no_stamp(checkout):
    stub_python(checkout)
    stamp = checkout / ".venv" / ".complete"
    stamp.parent.mkdir()
    stamp.touch()  # of an earlier set-up whose Python is gone
    done = make(checkout, "setup")
    assert done.returncode != 0
    assert "not all installed" in done.stderr
    assert "free disk space" in done.stderr
    assert not stamp.exists()
    assert "ci/setup.sh" in make(checkout, "-n", "demo").stdout


def test_make_demo_clean_removes_the_demo_only(checkout):
    folders = ["outputs/demo", "outputs/mine", ".cache/demo", ".cache/mine"]
    for folder in folders:
        (checkout / folder).mkdir(parents=True)
    assert make(checkout, "demo-clean").returncode == 0
    assert [folder for folder in folders if (checkout / folder).exists()] == ["outputs/mine", ".cache/mine"]


def test_make_help_lists_every_target(checkout):
    targets = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1].split()
    listed = re.findall(r"^  make ([\w-]+) ", make(checkout).stdout, flags=re.MULTILINE)
    assert sorted(listed) == sorted(targets)
