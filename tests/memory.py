"""How much memory a piece of a test, or of a benchmark, takes."""

import contextlib
import resource
import sys
from pathlib import Path


class Growth:
    """The most that the process grew by while the block ran: `mebibytes`, after it.

    Linux forgets the old peak when asked to. Elsewhere growth below it is not seen.
    """

    def __enter__(self):
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._before = _peak_bytes()
        return self

    def __exit__(self, *exception):
        self.mebibytes = (_peak_bytes() - self._before) / 2**20


@contextlib.contextmanager
def takes_at_most(mebibytes):
    """Fail when the process grows by more than that inside the block, at any moment of it."""
    with Growth() as growth:
        yield
    assert growth.mebibytes < mebibytes, f"took {growth.mebibytes:,.0f} MiB"


def _peak_bytes():
    try:
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
