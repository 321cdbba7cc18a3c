"""Let a policy learn from success alone: GRPO for PI0.5 in an environment, on one laptop or a cluster.

    python grpo.py --preset demo
    python grpo.py --policy.path outputs/demo/pretrained_model --env.type two_bins --output_dir outputs/learned

The architecture, top to bottom: `main` resolves the run and starts it; `train`, in every training process, has the
policy play groups of episodes in environments of its own, and updates it by what came of them. No weights travel: the
process that trains also acts. The mathematics is in docs/grpo.md.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # help and errors come before seconds of imports
    from vla_finetuning.flags import GRPO, check_command_line

    CONFIG = check_command_line(GRPO, then="checked")
    from vla_finetuning.run.preflight import check_start_of

    EXAMINED = check_start_of(CONFIG)

import contextlib
import gc
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import ray
import ray.train
import torch
from ray.exceptions import RayError
from torch import nn

import vla
from util import StepResult, TrainableOptimizer, train_step
from vla_finetuning.config import CACHE_DIR, GrpoOptions
from vla_finetuning.demo import prepare_disobedient
from vla_finetuning.evaluation.player import Player
from vla_finetuning.files import write_json
from vla_finetuning.flags import GRPO, parse_grpo
from vla_finetuning.policies.flow import FlowLoss
from vla_finetuning.program import Work, run_program
from vla_finetuning.report.tracking import require_tracker, track
from vla_finetuning.rl.acting import Actor, Explorer
from vla_finetuning.rl.before_after import before_and_after, success_lines
from vla_finetuning.rl.expected import expected_times, measure_environment, worker_memory
from vla_finetuning.rl.learning import (
    IterationLog,
    Lessons,
    Times,
    asked_of_all,
    build_grpo_optimizer,
    check_finite,
    check_first,
    everyone,
    frozen_copy,
    held_out,
    iteration_line,
    make_demonstrations,
    make_rollouts,
    metrics_of,
    play_iteration,
)
from vla_finetuning.rl.objective import Objective, totals
from vla_finetuning.rl.recording import (
    dataset_of,
    forget_episodes,
    is_iteration_recorded,
    record_rollouts,
    write_episodes,
)
from vla_finetuning.rl.resolve import INITIAL_STATES_NAME, GrpoRun, describe_grpo, resolve_grpo
from vla_finetuning.run import cluster
from vla_finetuning.run.checkpoint import load_checkpoint
from vla_finetuning.run.exported import POLICY_DIR, policy_problem, report_line
from vla_finetuning.run.failures import root_cause
from vla_finetuning.run.folder import (
    EVALUATION_NAME,
    check_start,
    finish,
    first_step_done,
    own_folder,
    prune_checkpoints,
    stop_requested,
)
from vla_finetuning.run.preflight import Examined, examine
from vla_finetuning.run.record import record_run
from vla_finetuning.terminal import tell, tell_error, tell_text
from vla_finetuning.training.attempt import begin
from vla_finetuning.training.capacity import describe_memory
from vla_finetuning.training.checkpoint_writer import CheckpointWriter
from vla_finetuning.training.export import export, exported_checkpoint
from vla_finetuning.training.fitting import fit, worker_group
from vla_finetuning.training.model import build_model, check_attention
from vla_finetuning.training.parallel import spread
from vla_finetuning.training.worker import RayWorker, Worker

# ---- training: one process per GPU, which acts, too ---------------------------------------------------------------


def train_loop_per_worker(loop_config: dict[str, ray.ObjectRef[GrpoRun]]) -> None:
    """Train to the end of the run and export the policy. Runs in every training process."""
    run, worker = ray.get(loop_config["run"]), RayWorker()
    if train(run, worker) and worker.rank == 0:
        export(run.policy, exported_checkpoint(run.job, best=False), run.job.output_dir, run.scene.drawn)


def train(run: GrpoRun, worker: Worker) -> bool:
    """Train from the newest checkpoint to the end of the run; False if the run was asked to stop before."""
    config, options, job, policy, began = run.config, run.options, run.job, run.policy, time.monotonic()
    rank, world, device = worker.rank, worker.world, worker.device
    attempt = begin(job, worker, config.train.deterministic)
    progress = attempt.progress

    rollouts = make_rollouts(run.scene, options, job.timeouts)  # its processes start while the model is made
    loss, autocast = build_model(policy, device)
    assert isinstance(loss, FlowLoss)  # the plan refuses others
    check_attention(policy, loss, device, autocast, job.output_dir if rank == 0 else None)
    player = Player(
        loss.policy, *policy.processors(), env=run.scene.env, rename_map=policy.rename_map, opening=policy.opening
    )
    actor = Actor(
        loss, player, prompts=policy.prompts, inference_batch=options.inference_batch, autocast=autocast, device=device
    )
    loss.mask_padding = options.method == "filtered"  # of own chunks what was executed
    demonstrations = make_demonstrations(run.demonstrations, policy, job.timeouts)
    objective = Objective(loss, run.sde, options, config.seed).to(device)
    start = frozen_copy(objective) if options.kl else None
    model = spread(objective, config.scaling.strategy, device, world, autocast=autocast)
    optimizer = build_grpo_optimizer(config, objective)
    if attempt.checkpoint is not None:
        load_checkpoint(attempt.checkpoint, optimizer.named(), optimizer.state())
    log = IterationLog(job.output_dir, progress.step) if rank == 0 else None
    if rank == 0:
        forget_episodes(job.output_dir, progress.step)
    prune = partial(prune_checkpoints, config.training(), job.steps)
    checkpoints = CheckpointWriter(job, optimizer, worker, attempt.number, config.save_every_s, prune)
    first = progress.step
    if first == 0:
        times = Times()
        before = held_out(config, run.scene, rollouts, actor, worker)
        times.mark("held_out")
        seconds = times.gather(rollouts, actor)
        if log is not None:
            log.write(0, {**before, **seconds})

    stop, preempted, nonfinite = False, False, 0
    # Of the demonstrations where there are any, with which nothing is played again; otherwise episodes.
    first_row, episodes = progress.rows, first * run.episodes if demonstrations is not None else progress.rows
    for iteration in range(first, job.steps):
        times, done = Times(), iteration + 1
        recorded = is_iteration_recorded(run, iteration)
        explorer = Explorer(actor, run.sde, config.seed, iteration, recorded)
        played, rounds = play_iteration(options, run.scene, rollouts, explorer, worker)
        if recorded:
            write_episodes(job.output_dir, iteration, worker, [one for each in rounds for one in each.episodes])
        episodes += sum(one.returns.numel() for one in rounds)
        check_first(options, iteration, played)
        times.mark("play")
        lessons = Lessons(
            config,
            objective,
            start,
            actor,
            explorer,
            played,
            worker=worker,
            demonstrations=demonstrations,
            first_row=first_row,
        )
        times.mark("score")
        results = learn(options, model, objective, optimizer, lessons, iteration, worker, autocast)
        first_row += lessons.demonstrated
        times.mark("update")
        metrics = metrics_of(options, played, rounds, lessons, objective, results)
        nonfinite += metrics["nonfinite_steps"]
        check_finite(config.train.max_nonfinite, nonfinite)
        if done % options.eval_every == 0 or done == job.steps:
            metrics |= held_out(config, run.scene, rollouts, actor, worker)
        times.mark("held_out")
        metrics |= times.gather(rollouts, actor)
        del explorer, played, rounds, lessons  # images of all decisions, which the next iteration's would be beside
        gc.collect()
        # A node is about to be taken away; Ray Train starts the group anew when it is gone.
        if (deadline_ms := worker.preemption_deadline_ms()) is not None:
            checkpoints.ends_at(deadline_ms)
        own = (stop_requested(job.output_dir), checkpoints.due()) if rank == 0 else (False, False)
        stop, due, announced = asked_of_all(device, *own, deadline_ms is not None)
        due, preempted = due or (announced and not preempted), announced
        if log is not None:
            if iteration == first:
                first_step_done(job.output_dir, done, time.monotonic() - began)
            log.write(done, {"episodes": episodes, "lr": optimizer.schedule(iteration), **metrics})
        if done == job.steps or done % config.save_freq == 0 or stop or due:
            rows = episodes if demonstrations is None else first_row
            progress = replace(progress, step=done, rows=rows, loss=-metrics["success"])
            checkpoints.save(progress)
        if stop:
            break
    checkpoints.close()
    rollouts.close()
    return progress.step == job.steps


def learn(
    options: GrpoOptions,
    model: nn.Module,
    objective: Objective,
    optimizer: TrainableOptimizer,
    lessons: Lessons,
    iteration: int,
    worker: Worker,
    autocast: torch.dtype | None,
) -> list[StepResult]:
    """An iteration's updates, by the training step of every run; fewer where the policy has moved far enough."""
    objective.clear()
    results = []
    for epoch in range(options.epochs):
        for rows, count, micros in lessons.epoch(epoch):
            before = objective.sums.clone()
            result = train_step(
                model,
                optimizer,
                micros,
                step=iteration,
                grad_accum=count,
                mean_over=rows / worker.world,
                draws=lambda micro: (None, None),  # the batch has them
                autocast=autocast,
                device=worker.device,
            )
            results.append(result)
            # Where there is such a limit, the one value of an update that is read from the device.
            # Not below it: what is not a number is no reason to go on.
            if options.target_kl and not totals(everyone(objective.sums - before)).kl <= options.target_kl:
                return results
    return results


# ---- the driver ---------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None, examined: Examined | None = None) -> int:
    """Resolve, train, evaluate.

    Returns the exit status: 0 done, 1 the run failed, 2 it could not start, 3 it was asked to stop and can be resumed,
    5 the policy is trained, but could not be evaluated.
    """
    return run_program(GRPO, argv, partial(prepare, examined=examined))


def prepare(argv: list[str], held: contextlib.ExitStack, examined: Examined | None = None) -> Work | None:
    """Resolve the run, print its plan, check what can be checked before Ray starts, and take its folder."""
    config = parse_grpo(argv)
    if (examined or examine(config)).finished:
        return None
    require_tracker(config.track)
    if config.policy_path is None:
        folder = imitated(held, config.dry_run)
        if folder is None:
            tell("Imitation    comes first, and has not run: the plan is that of its policy; run without --dry_run")
            return None
        config = replace(config, policy_path=str(folder))
    run = resolve_grpo(config, cluster.gpus_found(config.scaling, config.preset))
    config, job = run.config, run.job
    check_start(config, job.start, job.steps, job.disk_bytes)
    dataset_of(run)  # what else is there is refused
    tell_text(describe_grpo(run))
    if config.dry_run:
        tell_text("\n".join(expected_times(run, measure_environment(run.scene.env))))
        if needed := worker_memory(run):
            tell_text(describe_memory(config.training(), needed, run.policy.checkpoint_bytes))
        return None
    held.enter_context(own_folder(config, job.start, job.steps, job.disk_bytes))
    held.enter_context(track(job.output_dir, config.track, config.track_project))
    return partial(work, run)


def work(run: GrpoRun) -> int:
    """Train on the cluster, and evaluate. Returns the exit status, see `main`."""
    job = run.job
    with contextlib.ExitStack() as beside:
        tell("Starting     Ray and the workers")
        cluster.start(job.scaling, cluster.node_needs(job.scaling, [], run.policy.shared_folder), job.output_dir)
        from vla_finetuning.rl.learning_page import (
            write_grpo_report,  # not above: training processes need no matplotlib
        )

        record_run(job, run.policy, describe_grpo(run), ray.cluster_resources())
        if run.scene.states:
            write_json(
                job.output_dir / INITIAL_STATES_NAME, {task: asdict(own) for task, own in run.scene.states.items()}
            )
        beside.callback(write_grpo_report, job.output_dir)
        workers = partial(worker_group, job, train_loop_per_worker, {"run": ray.put(run)})
        steps_done = fit(job, workers, iteration_line)
        if steps_done < job.steps:
            tell(f"Stopped      after iteration {steps_done} of {job.steps}; --resume goes on from there")
            return 3
        record_rollouts(run)
        status = evaluate(run)
    exported = job.output_dir / POLICY_DIR
    if problem := policy_problem(exported):
        raise FileNotFoundError(f"{problem}; --resume exports it again from the last checkpoint")
    if not status:
        finish(job.output_dir, job.steps)
    tell(f"Policy       {exported}", report_line(job.output_dir))
    return status


def evaluate(run: GrpoRun) -> int:
    """Have the policy play before and after, on the same fresh scenes. Returns the exit status."""
    try:
        scores, films = before_and_after(run)
        write_json(run.job.output_dir / EVALUATION_NAME, {"closed_loop": scores, "films": films})
        tell_text(success_lines(scores))
        return 0
    except (RayError, RuntimeError, ValueError, OSError) as error:
        tell_error(f"the policy is trained, but could not be tried: {root_cause(error)}")
        return 5


def imitated(held: contextlib.ExitStack, dry_run: bool) -> Path | None:
    """The demo's first half: a policy that `vla.py` has trained on disobedient demonstrators, now or earlier.

    None where a dry run would have to train it.
    """
    root = prepare_disobedient(CACHE_DIR / "demo")
    folder = root.with_name(f"{root.name}-policy")
    if policy_problem(folder / POLICY_DIR):
        if dry_run:
            return None
        if not ray.is_initialized():
            held.callback(ray.shutdown)
        cluster.connect()  # for both halves
        shutil.rmtree(folder, ignore_errors=True)
        tell("Imitation    of demonstrators, 30 % of which go to the wrong bin, by vla.py; once")
        flags = ["--preset", "demo", "--dataset.root", str(root), "--output_dir", str(folder), "--steps", "220"]
        if vla.main([*flags, "--dataset.eval_split", "0"]):
            raise ValueError(f"the demo's imitation failed; {folder} has its log")
    return folder / POLICY_DIR


if __name__ == "__main__":
    # Ray ships functions of `__main__` by value and those of modules by reference: run the module.
    import grpo

    sys.exit(grpo.main(examined=EXAMINED))
