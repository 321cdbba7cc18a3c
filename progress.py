"""Shows a run's progress on the driver's terminal, from the metrics that the run writes."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from tqdm import tqdm

METRICS_NAME = "metrics.jsonl"
LOG_NAME = "run.log"
POLL_S = 0.5


class MetricsLog:
    """`metrics.jsonl`, a line per log step, written by rank 0. After a restart, lines past the checkpoint are void.

    Args:
        output_dir: the run's folder. global_batch_size, rows_per_epoch: to count samples and epochs.
        resumed_step: optimizer steps that the checkpoint contains; later lines are removed.
        mfu_per_rate: model FLOP utilisation per sample/s; None where it is not known.
    """

    def __init__(
        self,
        output_dir: Path,
        global_batch_size: int,
        rows_per_epoch: int,
        resumed_step: int,
        mfu_per_rate: float | None,
    ):
        self._mfu_per_rate = mfu_per_rate
        self.path = output_dir / METRICS_NAME
        self._global_batch_size = global_batch_size
        self._rows_per_epoch = rows_per_epoch
        kept = [line for line in _lines(self.path) if json.loads(line)["step"] <= resumed_step]
        self.path.write_text("".join(line + "\n" for line in kept))

    def write(self, step: int, lr: float, metrics: dict[str, Any]) -> None:
        """Append a line for the window of steps that ends with `step`."""
        samples = step * self._global_batch_size
        epoch = round(samples / self._rows_per_epoch, 4)
        line = {
            **{"step": step, "epoch": epoch, "lr": lr},
            **metrics,
            "samples": samples,
            # Of the whole step, waiting for data included.
            "mfu": None if self._mfu_per_rate is None else self._mfu_per_rate * metrics["samples_per_s"],
            "spilled_bytes": spilled_bytes(),
        }
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")


def spilled_bytes() -> int:
    """Bytes that the cluster's object stores have written to disk since it started."""
    return object_store().spilled_bytes_total


def object_store() -> Any:
    """Ray's account of the cluster's object stores: `object_store_bytes_used`, `spilled_bytes_total`, ...

    Ray 2.60 offers it only through this private call, which its own benchmarks use.
    """
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return get_memory_info_reply(state).store_stats


def log_to(output_dir: Path) -> None:
    """Send this process's warnings to the run's log, where the driver finds them. Called by training workers."""
    handler = logging.FileHandler(output_dir / LOG_NAME)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)


@contextlib.contextmanager
def follow_progress(output_dir: Path, steps: int) -> Iterator[None]:
    """While the block runs: a progress bar on a terminal, otherwise a line per log step; and workers' warnings.

    Args:
        output_dir: the run's folder; `metrics.jsonl` and `run.log` in it need not exist yet.
        steps: optimizer steps of the whole run.
    """
    stop = threading.Event()
    thread = threading.Thread(target=_follow, args=(output_dir, steps, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _follow(output_dir: Path, steps: int, stop: threading.Event) -> None:
    interactive = sys.stdout.isatty()
    # What an earlier attempt of a resumed run wrote is not news.
    last_step = max([json.loads(line)["step"] for line in _lines(output_dir / METRICS_NAME)], default=0)
    warnings_shown = len(_lines(output_dir / LOG_NAME))
    with tqdm(
        total=steps, initial=last_step, unit="step", file=sys.stdout, disable=not interactive, dynamic_ncols=True
    ) as bar:
        while True:
            stopping = stop.is_set()
            for text in _lines(output_dir / LOG_NAME)[warnings_shown:]:
                tqdm.write(text, file=sys.stderr)
                warnings_shown += 1
            for text in _lines(output_dir / METRICS_NAME):
                line = json.loads(text)
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


def _lines(path: Path) -> list[str]:
    """Whole lines of the file; one that is still being written is left for the next time."""
    if not path.exists():
        return []
    text = path.read_text()
    return text[: text.rfind("\n") + 1].splitlines()


def _minutes(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
