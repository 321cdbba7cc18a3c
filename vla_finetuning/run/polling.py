"""Call a function repeatedly in a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def polling(look: Callable[[], None], every_s: float) -> Iterator[None]:
    """In the block, call `look` in a thread immediately, and then every `every_s` seconds."""
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
