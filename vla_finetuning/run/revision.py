"""Find the revision of this project's code, to record it in a run's files."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
from pathlib import Path


def code_revision() -> str:
    """Return the commit, with `-dirty` if files differ from it; without git, a digest of the modules."""
    root = Path(__file__).resolve().parents[2]
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(describe, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    modules = hashlib.sha256()
    for path in sorted([*root.glob("*.py"), *root.glob("vla_finetuning/**/*.py")]):
        modules.update(path.read_bytes())
    return f"sha256:{modules.hexdigest()}"
