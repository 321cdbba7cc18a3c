"""Policies of checkpoints on the Hub while training goes on (`--save_checkpoint_to_hub`). Runs on the driver.

`OUTPUT_DIR/pushed.jsonl` has a line for each: {"step": 200, "commit": "https://..."}; a resumed run pushes the others.
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vla_finetuning.files import read_lines
from vla_finetuning.lines import append_line
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.run.checkpoint import checkpoints
from vla_finetuning.run.job import Job
from vla_finetuning.run.polling import polling
from vla_finetuning.run.push import POLICY_DIR, push_checkpoint
from vla_finetuning.training.export import export

logger = logging.getLogger(__name__)

PUSHED_NAME = "pushed.jsonl"
POLL_S = 5.0


@contextlib.contextmanager
def pushing_checkpoints(spec: PolicySpec, job: Job, repo_id: str, drawn: Mapping[str, Any]) -> Iterator[None]:
    """While the block runs, push the policy of each new checkpoint, in a thread; and at its end of those that are left.

    What cannot be pushed is a warning and does not end the run.

    Args: see `export`.
    """
    failed = set[int]()

    def push_new() -> None:
        _push_new(spec, job, repo_id, drawn, failed)

    try:
        with polling(push_new, POLL_S):
            yield
    finally:
        failed.clear()
        push_new()


def _push_new(spec: PolicySpec, job: Job, repo_id: str, drawn: Mapping[str, Any], failed: set[int]) -> None:
    """Push those that are not pushed, oldest first. `failed`: steps that are left for later."""
    record = job.output_dir / PUSHED_NAME
    try:
        pushed = {json.loads(line)["step"] for line in read_lines(record)}
        found = checkpoints(job.checkpoints_dir)
    except OSError as error:
        logger.warning("checkpoints are not pushed now: %s", error)
        return
    for step, checkpoint in found.items():
        if step in pushed | failed:
            continue
        try:
            with tempfile.TemporaryDirectory() as scratch:
                export(spec, checkpoint, Path(scratch), drawn)
                name = f"{step:0{max(6, len(str(job.steps)))}d}"  # as LeRobot's own folders of checkpoints
                commit = push_checkpoint(Path(scratch) / POLICY_DIR, repo_id, name)
            append_line(record, json.dumps({"step": step, "commit": commit}), now=True)
        except Exception as error:  # whatever an upload may end with, training goes on
            failed.add(step)
            logger.warning("the checkpoint of step %d is not pushed: %s", step, error)
