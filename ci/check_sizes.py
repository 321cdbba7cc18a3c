"""Refuse files that are too large for git: weights, videos, data sets and traces belong elsewhere.

python ci/check_sizes.py FILE ...
"""

from __future__ import annotations

import sys
from pathlib import Path

# requirements.lock, all hashes, has 0.42 MB.
LIMIT_BYTES = 1_000_000


def main(argv: list[str]) -> int:
    large = {name: size for name in argv if Path(name).is_file() and (size := Path(name).stat().st_size) > LIMIT_BYTES}
    for name, size in large.items():
        print(f"{name}: {size / 1e6:.1f} MB, at most {LIMIT_BYTES / 1e6:g} MB; keep it out of git", file=sys.stderr)
    return 1 if large else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
