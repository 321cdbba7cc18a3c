"""What follows a run from beside it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def polling(look: Callable[[], None], every_s: float) -> Iterator[None]:
    """While the block runs, call `look` in a thread: at once, and then every `every_s` seconds."""
    stop = threading.Event()

    def follow() -> None:
        look()
        while not stop.wait(every_s):
            look()

    thread = threading.Thread(target=follow, daemon=True, name=getattr(look, "__name__", "polling"))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
