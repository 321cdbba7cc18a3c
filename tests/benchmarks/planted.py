"""Sections that break, for the test of what becomes of them. Module-level: processes find them by their names."""

import signal
import subprocess
import time


class OutOfMemoryError(RuntimeError):
    """As PyTorch's is called; importing it takes seconds."""


def out_of_memory(results):
    def fails():
        raise OutOfMemoryError("CUDA out of memory")

    results.take("a small one", 0.0, lambda: 1)
    results.take("a large one", 0.0, fails)
    raise RuntimeError("CUDA error: an illegal memory access was encountered")  # as all that follows one


def crash(results):
    signal.raise_signal(signal.SIGSEGV)  # in this thread, before it goes on


def hang(results):
    results.take("before the hang", 0.0, lambda: 2)
    results.take("child of the hang", 0.0, lambda: subprocess.Popen(["sleep", "600"]).pid)
    time.sleep(600)


def fine(results):
    results.take("fine", 0.0, lambda: 3)
