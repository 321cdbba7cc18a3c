"""How much memory a piece of a test takes."""

import contextlib
import resource
import sys
from pathlib import Path


@contextlib.contextmanager
def takes_at_most(mebibytes):
    """Fail when the process grows by more than that inside the block, at any moment of it.

    Linux forgets the old peak when asked to. Elsewhere growth below it is not seen: such a block passes.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = _peak_bytes()
    yield
    grown = (_peak_bytes() - before) / 2**20
    assert grown < mebibytes, f"took {grown:,.0f} MiB"


def _peak_bytes():
    try:
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
