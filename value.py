"""Learn from failures without a simulator: what every frame of a dataset is worth, and which actions were good.

    python value.py --policy.path out/pretrained_model --dataset.root data/tried --outcome.success next.success \
        --output_dir out/value
    python vla.py --recap.labels out/value/labels.parquet --dataset.root data/tried ...

RECAP (arXiv 2511.14759): a value function learns from episodes that succeeded and others that failed; a frame after
which the robot stood better than the value function thought is positive, the others are negative. `vla.py
--recap.labels` writes that into the prompts that it trains on, and the robot is always told "positive". docs/recap.md.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # help and errors come before seconds of imports
    from vla_finetuning.options.command_line import VALUE, check_command_line

    CONFIG = check_command_line(VALUE, then="checked")
    from vla_finetuning.plan.preflight import examine_or_exit

    EXAMINED = examine_or_exit(CONFIG)

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray

import vla
from vla_finetuning.mirror import address
from vla_finetuning.options.command_line import VALUE, parse_value
from vla_finetuning.options.programs import ValueConfig
from vla_finetuning.plan.launch import on_cluster
from vla_finetuning.plan.look import look_at_rows
from vla_finetuning.plan.preflight import Examined, examine
from vla_finetuning.plan.record import record_run
from vla_finetuning.plan.resolve import Run
from vla_finetuning.program import Work, run_program
from vla_finetuning.report.tracking import require_tracker, track
from vla_finetuning.rl.values import ValueRun, describe_value, label_frames, resolve_value
from vla_finetuning.run import cluster
from vla_finetuning.run.checkpoint import load_progress
from vla_finetuning.run.exported import LABELS_NAME, report_line
from vla_finetuning.run.folder import checkpoint_to_resume, finish, own_folder, prepare_folder
from vla_finetuning.terminal import print_safe, print_safe_text
from vla_finetuning.training.export import exported_checkpoint
from vla_finetuning.training.fitting import fit
from vla_finetuning.training.worker import RayWorker


def train_loop_per_worker(loop_config: dict[str, ray.ObjectRef[Run]]) -> None:
    """Train to the end of the run. Runs in every training process."""
    vla.train(ray.get(loop_config["run"]), RayWorker())


def main(argv: Sequence[str] | None = None, examined: Examined | None = None) -> int:
    """Resolve, train, label.

    Returns the exit status: 0 done, 1 the run failed, 2 it could not start, 3 it was asked to stop and can be resumed.
    """
    return run_program(VALUE, argv, partial(prepare, examined=examined))


def prepare(argv: list[str], stack: contextlib.ExitStack, examined: Examined | None = None) -> Work | None:
    """Resolve the run, print its plan, check what can be checked before Ray starts, and take its folder."""
    examined = examined or examine(parse_value(argv))
    config: ValueConfig = examined.config
    if examined.finished:
        return None
    require_tracker(config.track)
    run = resolve_value(config, cluster.gpus_found(config.scaling, config.preset), examined.datasets)
    job = run.training.job
    stack.enter_context(own_folder(config, job.start, job.steps, job.disk_bytes))
    print_safe_text(describe_value(run))
    print_safe(*look_at_rows(run.training, examined.datasets))
    if config.dry_run:
        return None
    prepare_folder(config)
    stack.enter_context(track(job.output_dir, config.track, config.track_project))
    return partial(work, run)


def work(run: ValueRun) -> int:
    """Train on the cluster, and label. Returns the exit status, see `main`."""
    job = run.training.job
    with contextlib.ExitStack() as stack:
        print_safe("Starting     Ray and the workers; the first step takes about a minute")
        training, data_options = on_cluster(run.training)
        from vla_finetuning.report.page import keep_report  # not above: training processes need no matplotlib

        record_run(job, training.policy, describe_value(run), ray.cluster_resources(), training.rows)
        stack.enter_context(keep_report(job.output_dir))
        options: dict[str, Any] = {"loop": train_loop_per_worker}
        newest = checkpoint_to_resume(job.output_dir)
        steps_done = load_progress(newest).step if newest is not None else 0
        if steps_done < job.steps:  # otherwise it is to label anew
            steps_done = fit(job, lambda: vla.make_trainer(training, data_options, **options))
        if steps_done < job.steps:
            print_safe(f"Stopped      after step {steps_done} of {job.steps}; --resume goes on from there")
            return 3
        print_safe("Labels       what each frame is worth")
        print_safe_text(label_frames(run, training, exported_checkpoint(job, best=False)))
    print_safe(f"Labels       {address(job.output_dir / LABELS_NAME)}", report_line(job.output_dir))
    finish(job.output_dir, job.steps)
    return 0


if __name__ == "__main__":
    # Ray ships functions of `__main__` by value and those of modules by reference: run the module.
    import value

    sys.exit(value.main(examined=EXAMINED))
