"""Train a policy from success alone: GRPO for PI0.5 in an environment, on one laptop or a cluster.

    python grpo.py --preset demo
    python grpo.py --policy.path outputs/demo/pretrained_model --env.type two_bins --output_dir outputs/learned

`main` resolves the run and starts it. `train`, in every training process, lets the policy play groups of episodes in
its own environments, and updates it. No weights travel: the process that trains also acts. docs/grpo.md has the
mathematics.
"""

from __future__ import annotations

from vla_finetuning.options.command_line import GRPO

if __name__ == "__main__":  # help and errors come before imports that take seconds
    from vla_finetuning.start import launch

    launch(GRPO)

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import ray
from ray.exceptions import RayError

import vla
from vla_finetuning.files import write_json
from vla_finetuning.options.fields import decided
from vla_finetuning.plan.demo import DEMO_CACHE, prepare_disobedient
from vla_finetuning.plan.preflight import Examined
from vla_finetuning.program import Work, deliver, reported, run_training
from vla_finetuning.rl.before_after import before_and_after, success_lines
from vla_finetuning.rl.expected import expected_times, measure_environment, worker_memory
from vla_finetuning.rl.learning import iteration_line
from vla_finetuning.rl.loop import GrpoState, callbacks_for
from vla_finetuning.rl.recording import check_episodes, pending_dataset, record_rollouts
from vla_finetuning.rl.resolve import INITIAL_STATES_NAME, GrpoRun, describe_grpo, resolve_grpo
from vla_finetuning.run import cluster
from vla_finetuning.run.checkpoint import set_aside_damaged
from vla_finetuning.run.exported import POLICY_DIR, policy_problem
from vla_finetuning.run.failures import root_cause
from vla_finetuning.run.folder import EVALUATION_NAME
from vla_finetuning.terminal import print_safe, print_safe_error, print_safe_text
from vla_finetuning.training.capacity import describe_memory
from vla_finetuning.training.export import export, exported_checkpoint
from vla_finetuning.training.fitting import fit, recover, steps_done, worker_group
from vla_finetuning.training.worker import RayWorker, Worker

# ---- training: one process per GPU --------------------------------------------------------------------------------


def train_loop_per_worker(loop_config: dict[str, ray.ObjectRef[GrpoRun]]) -> None:
    """Train to the end of the run and export the policy. Runs in every training process."""
    run, worker = ray.get(loop_config["run"]), RayWorker()
    if train(run, worker) and worker.rank == 0:
        export(run.policy, exported_checkpoint(run.job, best=False), run.job.output_dir)


def train(run: GrpoRun, worker: Worker) -> bool:
    """Train from the newest checkpoint to the end of the run; return False if a stop was requested before."""
    if worker.rank == 0:
        set_aside_damaged(run.job.checkpoints_dir)
    return vla.train(run, worker, state_class=GrpoState, attached=callbacks_for).finished


# ---- the driver ---------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None, examined: Examined | None = None) -> int:
    """Resolve, train, evaluate.

    Returns the exit status: 0 done, 1 the run failed, 2 it could not start, 3 it was stopped and can be resumed, 5 the
    policy is trained, but could not be evaluated.
    """
    return run_training(GRPO, argv, examined, resolve, plan)


def resolve(examined: Examined, stack: contextlib.ExitStack) -> GrpoRun:
    config = examined.config
    if config.policy_path is None:
        config = decided(config, {"policy_path": str(imitated(stack, config.dry_run))})
    return resolve_grpo(config, cluster.gpus_found(config.scaling, config.preset))


def plan(run: GrpoRun) -> Work:
    """Print the run's plan, check the recording of episodes, and return the work."""
    config = run.config
    if pending_dataset(run) is not None and config.resume:  # a demo may start again over an earlier run
        check_episodes(run, steps_done(run.job))
    print_safe_text(describe_grpo(run))
    if config.dry_run:
        print_safe_text("\n".join(expected_times(run, measure_environment(run.scene.env))))
        if needed := worker_memory(run):
            print_safe_text(describe_memory(config.training(), needed, run.policy.checkpoint_bytes))
    return partial(work, run)


def work(run: GrpoRun) -> int:
    """Train on the cluster, and evaluate. Return the exit status, as `main`."""
    job = run.job
    print_safe("Starting     Ray and the workers")
    cluster.start(job.scaling, cluster.node_needs(job.scaling, [], run.policy.shared_folder), job.output_dir)
    recover(job)
    if states := run.scene.states:
        write_json(job.output_dir / INITIAL_STATES_NAME, {task: asdict(state) for task, state in states.items()})
    with reported(job, run.policy, describe_grpo(run)):
        workers = partial(worker_group, job, train_loop_per_worker, {"run": ray.put(run)})
        if not fit(job, workers, iteration_line, unit="iteration"):
            return 3
        status = evaluate(run)
        record_rollouts(run)
    return deliver(job, status)


def evaluate(run: GrpoRun) -> int:
    """Compare the policies before and after on the same fresh scenes. Return the exit status."""
    try:
        scores, films = before_and_after(run)
        write_json(run.job.output_dir / EVALUATION_NAME, {"closed_loop": scores, "films": films})
        print_safe_text(success_lines(scores))
        return 0
    except (RayError, RuntimeError, ValueError, OSError) as error:
        print_safe_error(f"the policy is trained, but could not be evaluated: {root_cause(error)}")
        return 5


def imitated(stack: contextlib.ExitStack, dry_run: bool) -> Path:
    """Train the demo's policy on disobedient demonstrators with `vla.py`, unless it exists; return its folder."""
    root = prepare_disobedient(DEMO_CACHE)
    folder = root.with_name(f"{root.name}-policy")
    if policy_problem(folder / POLICY_DIR):
        if dry_run:
            raise ValueError("--dry_run: the plan depends on the demo's policy, which is not trained yet; leave it out")
        if not ray.is_initialized():
            stack.callback(ray.shutdown)
        cluster.connect()  # for `vla.main` and for this run
        print_safe("Imitation    vla.py trains on demonstrators that go to the wrong bin in 30 % of their episodes")
        flags = ["--preset", "demo", "--dataset.root", str(root), "--output_dir", str(folder), "--steps", "220"]
        flags += ["--resume", "auto"]  # continues an interrupted run; a run in progress is refused
        if vla.main([*flags, "--dataset.eval_split", "0"]):
            raise ValueError(f"the demo's imitation failed; {folder} has its log")
    return folder / POLICY_DIR
