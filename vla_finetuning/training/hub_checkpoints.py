"""Policies of checkpoints on the Hub while training goes on (`--save_checkpoint_to_hub`). Runs on the driver.

`OUTPUT_DIR/pushed.jsonl` has a line for each: {"step": 200, "commit": "https://..."}; a resumed run pushes the others.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vla_finetuning.config import Config
from vla_finetuning.lines import append_line
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.run.checkpoint import checkpoints
from vla_finetuning.run.folder import POLICY_DIR, PUSHED_NAME, prune_checkpoints, pushed_steps
from vla_finetuning.run.job import Job
from vla_finetuning.run.polling import polling
from vla_finetuning.run.push import push_checkpoint
from vla_finetuning.terminal import tell
from vla_finetuning.training.export import export

logger = logging.getLogger(__name__)

POLL_S = 5.0


@contextlib.contextmanager
def pushing_checkpoints(config: Config, spec: PolicySpec, job: Job, drawn: Mapping[str, Any]) -> Iterator[None]:
    """While the block runs, push the policy of each new checkpoint, in a thread; and at its end of those that are left.

    Checkpoints wait for it (`prune_checkpoints`). What cannot be pushed is a warning and does not end the run; steps
    that are missing on the Hub at the end are named.

    Args: see `export`.
    """
    repo_id, failed = config.hub_repo_id, set[int]()
    assert repo_id is not None

    def push_new() -> None:
        _push_new(spec, job, repo_id, drawn, failed)

    try:
        with polling(push_new, POLL_S):
            yield
    finally:
        failed.clear()
        push_new()
    try:
        _tell_missing(config, job)
        prune_checkpoints(config, job.steps)
    except OSError as error:
        logger.warning("whether all checkpoints are pushed is not known: %s", error)


def _tell_missing(config: Config, job: Job) -> None:
    pushed, found = pushed_steps(job.output_dir), checkpoints(job.checkpoints_dir)
    left = sorted(found.keys() - pushed)
    due = range(config.save_freq, max(found, default=0), config.save_freq)
    gone = [step for step in due if step not in pushed | found.keys()]
    for steps, why in ((left, "their checkpoints stay"), (gone, "no checkpoint is left")):
        if steps:
            tell(f"Hub          without the policy of step {', '.join(map(str, steps))}: {why}", file=sys.stderr)


def _push_new(spec: PolicySpec, job: Job, repo_id: str, drawn: Mapping[str, Any], failed: set[int]) -> None:
    """Push those that are not pushed, oldest first. `failed`: steps that are left for later."""
    record = job.output_dir / PUSHED_NAME
    try:
        pushed = pushed_steps(job.output_dir)
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
