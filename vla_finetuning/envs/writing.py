"""Write and merge datasets with videos by LeRobot's own code, without its side effects."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path


@contextlib.contextmanager
def writing_videos() -> Iterator[None]:
    """Silence LeRobot while it writes a dataset, and reset the thread priorities that its AV1 encoder changes.

    Under root, as in a container, SVT-AV1 3.0 gives the encoding thread real-time priority (SCHED_FIFO 99). All its
    child processes inherit it, even a Ray cluster, whose spinning threads then starve others.
    """
    import av
    from datasets.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

    bars, level = is_progress_bar_enabled(), os.environ.get("SVT_LOG")
    real_time = _real_time_threads()
    disable_progress_bar()
    os.environ["SVT_LOG"] = "1"  # errors only; SVT-AV1 reads it
    av.logging.set_libav_level(av.logging.WARNING)
    try:
        yield
    finally:
        _set_ordinary_priority(real_time)
        av.logging.set_libav_level(av.logging.INFO)  # libav's default
        if bars:
            enable_progress_bar()
        if level is None:
            os.environ.pop("SVT_LOG", None)
        else:
            os.environ["SVT_LOG"] = level


def merge_datasets(repo_id: str, folders: Sequence[Path], root: Path) -> None:
    """Merge datasets with equal features into one, by LeRobot's own code; videos are copied, not encoded again."""
    from lerobot.datasets.aggregate import aggregate_datasets

    with writing_videos():  # for its silence
        aggregate_datasets([repo_id] * len(folders), repo_id, roots=list(folders), aggr_root=root)


def _set_ordinary_priority(excluded: set[int]) -> None:
    """Reset real-time scheduling of this process's threads, except of `excluded`."""
    empty = 0  # Linux may omit a living thread from a listing while others end, so require two empty listings
    while empty < 2:
        threads = _real_time_threads() - excluded
        empty = 0 if threads else empty + 1
        for thread in threads:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def _real_time_threads() -> set[int]:
    """Return the ids of this process's threads with real-time scheduling; empty on other systems than Linux."""
    threads = set()
    for thread in map(int, os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ()):
        with contextlib.suppress(ProcessLookupError):
            if os.sched_getscheduler(thread) in (os.SCHED_FIFO, os.SCHED_RR):
                threads.add(thread)
    return threads
