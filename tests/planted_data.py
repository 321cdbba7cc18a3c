"""Faults planted into a run's data, at a chosen row; and what was planted when.

Kept apart from `planted`, as `training.stream` is from `vla`: Ray's controller and data coordinators open it too, and
need not import LeRobot for that.

What happens when goes to `OUTPUT_DIR/planted.jsonl`, `{"event": "fault" or "step", "attempt": 0, "time": seconds}`, so
that its report can say how long the run took to train again.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_finetuning.buckets.mirror import file_of_process, files_of_processes, pull, push
from vla_finetuning.files import append_line, read_lines
from vla_finetuning.run.attempts import ATTEMPTS_NAME
from vla_finetuning.run.folder import attempts
from vla_finetuning.training.stream import LazyPickle

EVENTS_NAME = "planted.jsonl"
GREED_BYTES = 10 * 2**30


@dataclass(frozen=True)
class DataFault:
    """`action` of the task that reads stream position `position`, the first time that one does.

    hang: it never ends. greed: it takes GREED_BYTES of memory.
    """

    action: str
    position: int


def attempt_of(output_dir: Path) -> int:
    """Return the number of the newest attempt, whichever process started it."""
    pull(output_dir / ATTEMPTS_NAME)
    return len(attempts(output_dir)) - 1


def note(output_dir: Path, event: str) -> None:
    line = {"event": event, "attempt": attempt_of(output_dir), "time": time.time()}
    append_line(path := file_of_process(output_dir / EVENTS_NAME), json.dumps(line))
    push(path)


def noted(output_dir: Path, event: str) -> list[dict]:
    """All of that kind, in the order in which they came."""
    pull(output_dir)
    files = files_of_processes(output_dir / EVENTS_NAME)
    lines = [json.loads(line) for path in files for line in read_lines(path)]
    return [line for line in lines if line["event"] == event]


def recovered_s(output_dir: Path) -> list[float]:
    """For each fault, the seconds until a step was done that it did not prevent."""
    steps = noted(output_dir, "step")
    found = []
    for fault in noted(output_dir, "fault"):
        later = [step for step in steps if step["time"] > fault["time"]]
        # Another attempt, where there is one: what the failing one still did is void.
        after = [step for step in later if step["attempt"] > fault["attempt"]] or later
        found += [round(min(step["time"] for step in after) - fault["time"], 1)] if after else []
    return found


@dataclass
class FaultyPrepare:
    """In place of `TrainingData.prepare`, in the read task."""

    prepare: LazyPickle
    faults: list[DataFault]
    output_dir: Path

    def __call__(self, batch):
        for fault in self.faults:
            done = self.output_dir / f"{fault.action}_done"
            if fault.position in batch["position"] and not done.exists():
                done.touch()
                note(self.output_dir, "fault")
                hoard = []
                while fault.action == "greed" and len(hoard) < GREED_BYTES // 2**28:
                    hoard.append(np.ones(2**28, np.uint8))
                    time.sleep(0.05)
                time.sleep(10**6)
        return self.prepare(batch)
