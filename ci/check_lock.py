"""Check, without the network, that requirements.lock holds exactly the pins of requirements.txt.

    python ci/check_lock.py

Exit status 1, and what differs, when it does not.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent


def requirement_lines(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def direct_pins(root: Path = ROOT) -> dict[str, str]:
    """{canonical name: version} of requirements.txt. Raises ValueError at a line that is no pin."""
    pins: dict[str, str] = {}
    for line in requirement_lines(root / "requirements.txt"):
        requirement = Requirement(line.partition("#")[0])
        exact = [specifier.version for specifier in requirement.specifier if specifier.operator == "=="]
        if len(exact) != 1 or len(requirement.specifier) != 1:
            raise ValueError(f"requirements.txt: not pinned (NAME==VERSION): {line}")
        pins[canonicalize_name(requirement.name)] = exact[0]
    return pins


def locked(root: Path = ROOT) -> dict[str, tuple[str, int, bool]]:
    """{canonical name: (version, number of hashes, whether requirements.txt asks for it)} of the lock."""
    blocks = re.split(r"^(?=[A-Za-z0-9])", (root / "requirements.lock").read_text(), flags=re.MULTILINE)[1:]
    packages: dict[str, tuple[str, int, bool]] = {}
    for block in blocks:
        if (pin := re.match(r"([\w.-]+)==([^\s;]+)", block)) is None:
            raise ValueError(f"requirements.lock: not pinned: {block.splitlines()[0]}")
        hashes = re.findall(r"--hash=sha256:[0-9a-f]{64}\b", block)
        packages[canonicalize_name(pin[1])] = pin[2], len(hashes), "-r requirements.txt" in block
    return packages


def differences(root: Path = ROOT) -> list[str]:
    """Return what the lock and requirements.txt do not agree on, a sentence each."""
    wanted, held = direct_pins(root), locked(root)
    found = []
    for name, version in wanted.items():
        if name not in held:
            found.append(f"{name}=={version} is not in requirements.lock")
        elif held[name][0] != version:
            found.append(f"{name} is {version} in requirements.txt, {held[name][0]} in requirements.lock")
    asked_for = {name for name, (_, _, direct) in held.items() if direct}
    return found + [f"{name} has left requirements.txt" for name in sorted(asked_for - wanted.keys())]


def main() -> int:
    try:
        found = differences()
    except ValueError as error:
        found = [str(error)]
    for line in found:
        print(f"{line}; run `make lock`", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
