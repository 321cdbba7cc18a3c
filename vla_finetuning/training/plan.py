"""Print and check the plan of a run on the driver, before Ray starts."""

from __future__ import annotations

from dataclasses import replace

from vla_finetuning.plan.describe import describe
from vla_finetuning.plan.look import look_at_rows
from vla_finetuning.plan.resolve import Run
from vla_finetuning.run.push import check_push
from vla_finetuning.terminal import print_safe, print_safe_text
from vla_finetuning.training.capacity import check_memory
from vla_finetuning.training.chunks import fitted, sample_chunks


def show_plan(run: Run) -> Run:
    """Print the plan of a run, and return the run with the planned bytes of a worker's GPU.

    Raises ValueError or OSError for a problem that would end the run later, with its remedy.
    """
    print_safe_text(describe(run))
    print_safe(*look_at_rows(run))
    run = replace(run, gpu_bytes=check_memory(run))
    for repo_id in run.repositories.values():
        make = not run.config.dry_run
        print_safe(f"Hub          {check_push(repo_id, run.config.policy_private, make=make)}")
    if run.config.dry_run:
        fitted(run, sample_chunks)
    return run
