"""Shows a run's progress on the driver's terminal, from the metrics that the run writes."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

METRICS_NAME = "metrics.jsonl"
POLL_S = 0.5


@contextlib.contextmanager
def follow_progress(metrics: Path, steps: int) -> Iterator[None]:
    """While the block runs: a progress bar on a terminal, otherwise a line per log step.

    Args:
        metrics: `metrics.jsonl` of the run; it need not exist yet.
        steps: optimizer steps of the whole run.
    """
    stop = threading.Event()
    thread = threading.Thread(target=_follow, args=(metrics, steps, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _follow(path: Path, steps: int, stop: threading.Event) -> None:
    interactive = sys.stdout.isatty()
    last_step = 0
    with tqdm(total=steps, unit="step", file=sys.stdout, disable=not interactive, dynamic_ncols=True) as bar:
        while True:
            stopping = stop.is_set()
            for line in _read(path):
                if line["step"] <= last_step:
                    continue
                bar.update(line["step"] - last_step)
                last_step = line["step"]
                share = line["data_wait_s"] / line["step_s"] if line["step_s"] else 0.0
                told = f"loss {line['loss']:.4f}, {line['samples_per_s']:.1f} samples/s, {share:.0%} waiting for data"
                if interactive:
                    bar.set_postfix_str(told)
                else:
                    left_s = (steps - last_step) * line["step_s"]
                    print(f"step {last_step}/{steps}  {told}, {_minutes(left_s)} left", flush=True)
            if stopping:
                return
            stop.wait(POLL_S)


def _read(path: Path) -> list[dict]:
    """Whole lines of the file; one that is still being written is left for the next time."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _minutes(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
