"""Test a downloaded tokenizer in a subprocess with limits of CPU time and memory, before this process loads it.

Regular expressions and replacements in a tokenizer.json can take any time and memory for a short text, and the
`tokenizers` library has no limits. The subprocess imports only that library: 0.7 s for a vocabulary of 257,000.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from vla_finetuning.files import read_foreign_json

# PaliGemma's tokenizer.json has 34 MB.
MAX_BYTES = 256 * 2**20
# Largest growth of a text by normalizers. Those of known tokenizers do not lengthen texts.
MAX_GROWTH = 16
MAX_CPU_S, MAX_MEMORY_BYTES = 10, 2**30
# Characters of the test texts: the longest instruction that a dataset may have.
MAX_CHARACTERS = 20_000
PROJECT = Path(__file__).parents[2]  # the subprocess imports from there
REMEDY = "save the tokenizer again with the current `tokenizers` library, or use another one"


def check_tokenizer(path: Path) -> None:
    """Refuse a tokenizer.json that takes too much time or memory, or lengthens texts too much; a missing file passes.

    Raises:
        ValueError: the longest instruction exceeds a limit, or the file cannot be loaded.
    """
    if path.exists():
        status = path.stat()
        _check(path, (status.st_mtime_ns, status.st_size))


@lru_cache(maxsize=8)
def _check(path: Path, fingerprint: tuple[int, int]) -> None:
    _check_growth(path)
    command = [sys.executable, "-m", __name__, str(path.absolute()), str(MAX_CPU_S)]
    # The child limits its CPU time, which does not depend on the machine's load.
    child = subprocess.run(command, cwd=PROJECT, capture_output=True, stdin=subprocess.DEVNULL)
    if child.returncode:
        # At a limit, the library ends the process without an exception.
        reason = child.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {child.returncode}"
        raise ValueError(
            f"{path}: loading it and splitting one instruction takes more than {MAX_CPU_S} s of CPU time or "
            f"{MAX_MEMORY_BYTES / 2**30:.0f} GiB, or fails ({reason:.200}); {REMEDY}"
        )


def _check_growth(path: Path) -> None:
    """Refuse normalizers whose replacements may together lengthen some text by more than MAX_GROWTH."""
    saved = read_foreign_json(path, MAX_BYTES)
    pending = [saved.get("normalizer")] if isinstance(saved, dict) else []
    growth = 1.0
    while pending:
        step = pending.pop()
        if not isinstance(step, dict):
            continue
        pending += step.get("normalizers") or []
        pattern, content = step.get("pattern"), step.get("content")
        if isinstance(content, str):
            # A regular expression may match the empty string between any two characters.
            literal = pattern.get("String") if isinstance(pattern, dict) else None
            growth *= max(1.0, len(content) / len(literal) if literal else 1 + len(content))
    if growth > MAX_GROWTH:
        raise ValueError(
            f"{path}: its normalizers may make a text {growth:,.0f} times as long, more than {MAX_GROWTH}: it is made "
            f"to exhaust the memory; {REMEDY}"
        )


def _try_loading(path: str, cpu_s: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    printable = "".join(map(chr, range(32, 127)))
    repeated = "a" * (MAX_CHARACTERS - 1) + "!"  # worst case of regular expressions with nested repetitions
    for text in ((printable * (MAX_CHARACTERS // len(printable) + 1))[:MAX_CHARACTERS], repeated):
        tokenizer.encode(text)


if __name__ == "__main__":
    _try_loading(sys.argv[1], int(sys.argv[2]))
