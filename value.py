"""Train a value function on successes and failures of a dataset, and label its frames, without a simulator.

    python value.py --policy.path out/pretrained_model --dataset.root data/tried --outcome.success next.success \
        --output_dir out/value
    python vla.py --recap.labels out/value/labels.parquet --dataset.root data/tried ...

RECAP (arXiv 2511.14759): a value function learns from episodes that succeeded and others that failed. Frames whose
advantage is high are labelled positive, the others negative. `vla.py --recap.labels` adds the label to the prompts that
it trains on; the robot's prompt always has "positive". See docs/recap.md.
"""

from __future__ import annotations

from vla_finetuning.options.command_line import VALUE

if __name__ == "__main__":  # help and errors come before imports that take seconds
    from vla_finetuning.start import launch

    launch(VALUE)

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import ray

import vla
from vla_finetuning.buckets.mirror import address
from vla_finetuning.plan.look import look_at_rows
from vla_finetuning.plan.preflight import Examined
from vla_finetuning.plan.resolve import Run
from vla_finetuning.program import Work, report_line, reported, run_training
from vla_finetuning.rl.values import ValueRun, describe_value, label_frames, resolve_value
from vla_finetuning.run.exported import LABELS_NAME
from vla_finetuning.run.folder import finish
from vla_finetuning.terminal import print_safe, print_safe_text
from vla_finetuning.training.export import exported_checkpoint
from vla_finetuning.training.fitting import fit, on_cluster, steps_done
from vla_finetuning.training.worker import RayWorker


def train_loop_per_worker(loop_config: dict[str, ray.ObjectRef[Run]]) -> None:
    """Train to the end of the run. Runs in every training process."""
    vla.train(ray.get(loop_config["run"]), RayWorker())


def main(argv: Sequence[str] | None = None, examined: Examined | None = None) -> int:
    """Resolve, train, label.

    Returns the exit status: 0 done, 1 the run failed, 2 it could not start, 3 it was stopped and can be resumed.
    """
    return run_training(VALUE, argv, examined, resolve, plan)


def resolve(examined: Examined, _: ExitStack) -> ValueRun:
    return resolve_value(examined.config, datasets=examined.datasets)


def plan(run: ValueRun) -> Work:
    """Print the run's plan, look at its rows, and return the work."""
    print_safe_text(describe_value(run))
    print_safe(*look_at_rows(run.training))
    return partial(work, run)


def work(run: ValueRun) -> int:
    """Train on the cluster, and label. Return the exit status, as `main`."""
    job = run.job
    training, data_options = on_cluster(run.training)
    with reported(job, training.policy, describe_value(run), training.rows):
        trained = steps_done(job) >= job.steps  # a resumed run may only have to label
        if not trained and not fit(job, lambda: vla.make_trainer(training, data_options, train_loop_per_worker)):
            return 3
        print_safe("Labels       computing the value of each frame")
        print_safe_text(label_frames(run, training, exported_checkpoint(job, best=False)))
    print_safe(f"Labels       {address(job.output_dir / LABELS_NAME)}", report_line(job.output_dir))
    finish(job.output_dir, job.steps)
    return 0
