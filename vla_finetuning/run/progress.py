"""Log metrics, warnings and rows to a run's folder, and show progress on the driver's terminal."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import ray
from tqdm import tqdm

from vla_finetuning.buckets.mirror import address, file_of_process, files_of_processes, pull, push, release
from vla_finetuning.files import read_json_lines, read_lines, write_whole
from vla_finetuning.run.folder import (
    LOG_NAME,
    METRICS_NAME,
    ROWS_NAME,
    SKIPPED_NAME,
    attempts,
    skipped_episodes,
    skipped_in,
)
from vla_finetuning.run.polling import polling
from vla_finetuning.terminal import LogFormatter, print_safe

POLL_S = 0.5
# A log step, and with it all ranks, waits this long for nodes that do not answer.
SPILLED_TIMEOUT_S = 2.0
# Formats a line of metrics.jsonl for the terminal.
Line = Callable[[Mapping[str, Any]], str]


def success_of(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a line of `evaluations.jsonl`. Shares are of all listed episodes."""
    errors = evaluation.get("errors", 0)
    line = {"success_step": evaluation["step"], **({"success_errors": errors} if errors else {})}
    if not evaluation["episodes"]:
        return line
    for outcome in ("", "_at_end"):
        low, high = evaluation[f"interval{outcome}"]
        success = evaluation[f"successes{outcome}"] / (evaluation["episodes"] + errors)
        line |= {f"success{outcome}": success, f"success{outcome}_low": low, f"success{outcome}_high": high}
    return line


def keep_metrics(output_dir: Path, resumed_step: int) -> Path:
    """Remove void lines of `metrics.jsonl`, after `resumed_step`, and return its path."""
    path = output_dir / METRICS_NAME
    valid = [line for line in read_json_lines(path) if line["step"] <= resumed_step]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in valid))
    return path


def keep_skipped(output_dir: Path, rows: int) -> None:
    """Remove void positions of `skipped.jsonl`, from `rows` on, which an attempt reads again."""
    for path in files_of_processes(output_dir / SKIPPED_NAME):
        valid = []
        for line in skipped_in(path):
            positions = [position for position in line.get("positions", ()) if position < rows]
            if positions:
                valid.append({**line, "positions": positions})
            elif "positions" not in line:  # of an earlier version
                valid.append(line)
        text = "".join(json.dumps(line) + "\n" for line in valid)
        if text != path.read_text(errors="replace"):  # half a line, too, which would spoil the next one
            write_whole(path, text)
            push(path)
            release(path)  # a process of the last attempt may live on and append to it: fetch it again


def recorded_rows(output_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the valid lines of all ranks, without steps that a later attempt has trained again."""
    resumed_from = [line["resumed_from_step"] for line in attempts(output_dir)]
    pull(output_dir / ROWS_NAME)
    for path in sorted((output_dir / ROWS_NAME).glob("rank*.jsonl")):
        for text in read_lines(path):
            line = json.loads(text)
            if line["step"] <= min(resumed_from[line["attempt"] + 1 :], default=line["step"]):
                yield line


def check_skipped(output_dir: Path, share: float, rows: int, rows_per_epoch: int) -> None:
    """Check that at most a `share` (--dataset.max_skipped) of the first `rows`, or of an epoch's, was skipped.

    Raises ValueError: more rows were skipped; names the datasets, the first reason and the remedy.
    """
    # Count stream positions once: a later attempt reads rows again, and read tasks run ahead.
    skipped: dict[int, dict[str, Any]] = {}
    for line in skipped_episodes(output_dir):
        skipped |= {position: line for position in line.get("positions", ()) if position < rows}
    if len(skipped) <= share * max(rows, rows_per_epoch):
        return
    first = skipped[min(skipped)]
    raise ValueError(
        f"dataset {', '.join(sorted({line['root'] for line in skipped.values()}))}: {len(skipped)} of the first {rows} "
        f"rows could not be read and were skipped, which is more than --dataset.max_skipped={share:g} of them or of an "
        f"epoch's {rows_per_epoch}; the first was of episode {first['episode_index']}: {first['error']}. "
        f"{address(output_dir / SKIPPED_NAME)} lists them all: repair or copy them again, or give a higher "
        "--dataset.max_skipped, and --resume; or leave their episodes out (--dataset.exclude_episodes) in a new run"
    )


def spilled_bytes() -> int | None:
    """Return the bytes that the cluster's object stores have spilled, or None if a node does not answer."""
    try:
        return object_store(SPILLED_TIMEOUT_S).spilled_bytes_total
    except Exception:  # of gRPC or Ray; a statistic must not end training
        return None


def object_store(timeout_s: float = 60.0) -> Any:
    """Return Ray's statistics of object stores: `object_store_bytes_used`, `spilled_bytes_total`, ...

    Ray 2.60 has them only in this private call, which its own benchmarks use.
    """
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return get_memory_info_reply(state, timeout_seconds=timeout_s).store_stats


def log_to(output_dir: Path) -> None:
    """Write this process's warnings to the run's log, which the driver shows. Called by training workers."""
    handler = logging.FileHandler(file_of_process(output_dir / LOG_NAME))
    handler.setLevel(logging.WARNING)
    handler.setFormatter(LogFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)


def step_line(line: Mapping[str, Any]) -> str:
    """Format a line of `metrics.jsonl` for the terminal."""
    share = line["data_wait_s"] / line["step_s"] if line["step_s"] else 0.0
    text = (
        f"loss {line['loss']:.4f}, {line['samples_per_s']:.1f} samples/s "
        f"({line['frames_per_s']:.0f} frames, {line['decoded_bytes_per_s'] / 1e6:.1f} MB), "
        f"{share:.0%} waiting for data"
    )
    held_out = line.get("eval_loss")
    if held_out is not None:
        text += f", held-out loss {held_out:.4f}"
    skipped = line.get("eval_skipped")
    return f"{text}, without {skipped} held-out rows that could not be read" if skipped else text


@contextlib.contextmanager
def follow_progress(output_dir: Path, steps: int, line: Line = step_line) -> Iterator[None]:
    """In the block, show workers' warnings, and a progress bar on a terminal or else a line per log step."""
    interactive = sys.stdout.isatty()
    follower = _Follower(output_dir, steps, line, interactive)
    with tqdm(
        total=steps, initial=follower.step, unit="step", file=sys.stdout, disable=not interactive, dynamic_ncols=True
    ) as bar:

        def look() -> None:
            with contextlib.suppress(OSError):  # a drive that does not answer: the next look shows it
                follower.look(bar)

        try:
            with polling(look, POLL_S):
                yield
        finally:
            with contextlib.suppress(OSError):  # a store that does not answer
                pull(output_dir)
            look()


class _Follower:
    """Print new lines of a run's folder, without lines that existed before."""

    def __init__(self, output_dir: Path, steps: int, line: Line, interactive: bool):
        self._output_dir, self._steps, self._line = output_dir, steps, line
        self._interactive, self._starting = interactive, True
        self._skipped: set[tuple[str, int]] = set()
        self.step = max((line["step"] for line in read_json_lines(output_dir / METRICS_NAME)), default=0)
        self._warnings = {path.name: len(read_lines(path)) for path in files_of_processes(output_dir / LOG_NAME)}
        self._starts = len(attempts(output_dir))

    def look(self, bar: Any) -> None:
        output_dir, steps = self._output_dir, self._steps
        for path in files_of_processes(output_dir / LOG_NAME):
            lines, count = read_lines(path), self._warnings.get(path.name, 0)
            self._warnings[path.name] = len(lines)
            for text in lines[count:]:
                print_above_bar(text, sys.stderr)
        for line in skipped_episodes(output_dir):
            episode = (line["root"], line["episode_index"])
            if episode not in self._skipped:
                self._skipped.add(episode)
                print_above_bar(f"WARNING {episode[0]}: episode {episode[1]} is skipped: {line['error']}", sys.stderr)
        if len(starts := attempts(output_dir)) > self._starts:
            self._starts, self._starting = len(starts), True
            print_above_bar(
                f"started      {starts[-1]['world_size']} training processes from step "
                f"{starts[-1]['resumed_from_step']}: building the model and reading the first batch"
            )
        metrics = read_json_lines(output_dir / METRICS_NAME)
        last_step = max((line["step"] for line in metrics), default=0)
        if last_step < self.step:  # an attempt that resumed from an earlier step has removed the later lines
            bar.update(last_step - self.step)
            self.step = last_step
        for line in metrics:
            if line["step"] <= self.step:
                continue
            bar.update(line["step"] - self.step)
            self.step = line["step"]
            line_text = self._line(line)
            if self._interactive:
                bar.set_postfix_str(line_text)
            else:
                # The first steps after a start also wait for the data engine to fill.
                step_s = line["step_s"] - line.get("data_wait_s", 0.0) * self._starting
                left_s = (steps - self.step) * step_s
                print_safe(f"step {self.step}/{steps}  {line_text}, {tqdm.format_interval(left_s)} left")
            self._starting = False


def print_above_bar(text: str, file: TextIO | None = None) -> None:
    """Print a line that does not break the progress bar."""
    with tqdm.external_write_mode(file=file):
        print_safe(text, file=file)
