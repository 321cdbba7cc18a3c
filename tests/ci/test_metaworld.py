"""`make metaworld`: its lock agrees with requirements.lock, and Debian's libraries are installed by root only."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from ci.check_lock import locked

ROOT = Path(__file__).resolve().parents[2]


def pins(name):
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / name).read_text(), flags=re.MULTILINE))


def test_metaworld_lock_agrees_with_requirements_lock():
    """Pins of another version would be put over those of requirements.lock."""
    locked_versions = pins("requirements-metaworld.lock")
    assert pins("requirements-metaworld.txt").items() <= locked_versions.items()
    assert (ROOT / "requirements-metaworld.lock").read_text().count("--hash=sha256:") > len(locked_versions)
    shared = {name: version for name, (version, *_) in locked().items() if name in locked_versions}
    assert len(shared) > 5 and shared == {name: locked_versions[name] for name in shared}


@pytest.mark.parametrize(("user", "status"), [("0", 0), ("1000", 1)])
def test_metaworld_libraries_are_installed_by_root_only(tmp_path, user, status):
    log, drawn = tmp_path / "log", tmp_path / "libEGL"
    programs = {
        "id": f"echo {user}",
        "uname": "echo Linux",
        "apt-get": f'echo "apt-get $*" >>{log}; touch {drawn}',
        # Its first look for libraries fails, and goes well once they are installed.
        "python": f'case "$*" in *ctypes*) test -e {drawn};; *pip*) echo pip >>{log};; *) echo draws >>{log};; esac',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "python")}
    done = subprocess.run(["sh", ROOT / "ci/metaworld.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    lines = log.read_text().splitlines()
    packages = "libegl1 libegl-mesa0 libgl1-mesa-dri"
    if status:
        assert lines == ["pip"] and f"apt-get install {packages}" in done.stderr
    else:
        assert lines == ["pip", "apt-get update", f"apt-get install -y --no-install-recommends {packages}", "draws"]
