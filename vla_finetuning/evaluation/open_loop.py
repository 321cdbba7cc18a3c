"""Measure the open-loop error of a trained policy on held-out frames, at the end of a run.

The policy predicts a chunk from each frame's observation, which is compared with the recorded chunk. Errors are in the
dataset's own units, over action steps within the episode; padding does not count.

Legend: N rows of a batch, T chunk, A action, H W C image.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.policies.factory import get_policy_class
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import ACTION, OBS_PREFIX

from lerobot_datasource import LeRobotDatasource
from vla_finetuning.buckets.mirror import fetched_for_good, push
from vla_finetuning.columns import IS_SKIPPED
from vla_finetuning.data.metadata import DatasetMetadata
from vla_finetuning.data.options import Features, Reading, Selection
from vla_finetuning.data.plan import evenly_spaced
from vla_finetuning.data.selection import tasks_of
from vla_finetuning.evaluation.robot_tools import MOST_STEPS, compare_tools
from vla_finetuning.files import write_json
from vla_finetuning.plan.resolve import Run, select_robot
from vla_finetuning.plan.rows import Rows
from vla_finetuning.plan.statistics import relative_actions
from vla_finetuning.policies.loading import load_policy_config
from vla_finetuning.policies.pipelines import load_processors
from vla_finetuning.policies.processors import to_float
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.remote_code import remote_code
from vla_finetuning.policies.spec import PolicySpec, Robot
from vla_finetuning.policies.trainable import autocast_dtype, cast_frozen, choose_trainable
from vla_finetuning.run.folder import EVALUATION_NAME

# Number of evenly spaced held-out frames of an evaluation, and frames per batch.
EVAL_FRAMES, EVAL_BATCH = 192, 32
TASK = "task"
ACTION_IS_PAD = f"{ACTION}_is_pad"
# Columns that locate an example in its dataset.
PLACE = ("dataset_index", "episode_index", "frame_index")


def other_instructions(instructions: Iterable[str]) -> dict[str, str]:
    """Map each instruction to another one; return an empty dict if there is only one."""
    distinct = list(dict.fromkeys(instructions))
    return dict(zip(distinct, distinct[1:] + distinct[:1], strict=True)) if len(distinct) > 1 else {}


def open_loop_errors(
    policy: PreTrainedPolicy,
    preprocessor: Any,
    postprocessor: Any,
    batches: Iterable[Mapping[str, np.ndarray]],
    *,
    mean_action: np.ndarray,
    other_instruction: Mapping[str, str] | None = None,
    seed: int = 0,
    autocast: torch.dtype | None = None,
) -> dict[str, Any]:
    """Compute mean errors of a policy's action chunks and of baselines over the same frames.

    Runs on the policy's device. The same seed and batches give the same noise, so that policies are compared on the
    same draws. The process's random state is restored.

    Args:
        batches: columns of N rows: cameras uint8 (N, H, W, 3), `observation.state` (N, S), `action` (N, T, A) at the
            policy's offsets, `action_is_pad` bool (N, T), `task` (N,) strings; others are ignored. Only recorded
            actions that the policy predicts count.
        mean_action: prediction of the constant baseline, (A,).
        other_instruction: another instruction for each one (`other_instructions`); None or empty: not measured.
        autocast: dtype of autocast; None: the weights' own precision.
    Returns:
        JSON: `{"frames": n, "mean_action": e, "policy": e, "other_instruction": e or None}`, each e being `{"mse":
        float, "mae": [A floats]}` over all actions that are not padding; `"by_task": {instruction: {"frames": n,
        "mean_action": e, "policy": e}}`; and `"examples"`, the first frame of every batch: `{"task", "recorded": T x A,
        "predicted": T x A, "is_pad": T}` and its place in the dataset.
    Raises:
        ValueError: no frames; longer or wider chunks than recorded.
    """
    device = next(policy.parameters()).device
    now = list(policy.config.action_delta_indices or [0]).index(0)  # recorded chunks may begin in the past (diffusion)
    sums = {name: _ErrorSum() for name in ("mean_action", "policy", "other_instruction")}
    by_task: dict[str, dict[str, _ErrorSum]] = {}
    examples = []
    was_training = policy.training
    policy.eval()
    try:
        for number, batch in enumerate(batches):
            present = without_future(batch, policy.config.observation_delta_indices)
            instructions = [str(task) for task in batch[TASK]]
            spoken = {"policy": instructions}
            if other_instruction:
                spoken["other_instruction"] = [other_instruction[task] for task in instructions]
            for name, tasks in spoken.items():
                observation = _observation(preprocessor, present, tasks, device)
                with torch.autocast(device.type, autocast, enabled=autocast is not None):
                    chunk = _predict(policy, observation, (seed, number))
                predicted = postprocessor(chunk.float()).double().cpu().numpy()
                steps = slice(now, now + predicted.shape[1])
                recorded = np.asarray(batch[ACTION], np.float64)[:, steps]
                counted = ~np.asarray(batch[ACTION_IS_PAD], bool)[:, steps]
                sums[name].add(predicted, recorded, counted)
                if name != "policy":
                    continue
                constant = np.broadcast_to(np.asarray(mean_action, np.float64), recorded.shape)
                sums["mean_action"].add(constant, recorded, counted)
                for task in dict.fromkeys(instructions):
                    rows = [i for i, instruction in enumerate(instructions) if instruction == task]
                    task_sums = by_task.setdefault(task, {"mean_action": _ErrorSum(), "policy": _ErrorSum()})
                    task_sums["mean_action"].add(constant[rows], recorded[rows], counted[rows])
                    task_sums["policy"].add(predicted[rows], recorded[rows], counted[rows])
                examples.append(
                    {
                        TASK: instructions[0],
                        **{key: int(batch[key][0]) for key in PLACE if key in batch},
                        "recorded": recorded[0].tolist(),
                        "predicted": predicted[0].tolist(),
                        "is_pad": (~counted[0]).tolist(),
                    }
                )
    finally:
        policy.train(was_training)
    if not sums["policy"].frames:
        raise ValueError("there are no frames to evaluate on: hold out at least one episode (--dataset.eval_split)")
    return {
        "frames": sums["policy"].frames,
        **{name: total.mean() for name, total in sums.items()},
        "by_task": {
            task: {"frames": task_sums["policy"].frames, **{name: total.mean() for name, total in task_sums.items()}}
            for task, task_sums in by_task.items()
        },
        "examples": examples,
    }


def without_future(batch: Mapping[str, np.ndarray], deltas: Sequence[int] | None) -> Mapping[str, np.ndarray]:
    """Return rows as a robot observes them: windows (N, T, ...) reduced to the present of the T offsets `deltas`."""
    if deltas is None or max(deltas) <= 0:
        return batch
    keys = (key for key in batch if key.startswith(OBS_PREFIX) and not key.endswith("_is_pad"))
    return {**batch, **{key: batch[key][:, deltas.index(0)] for key in keys}}


def _observation(
    preprocessor: Any, batch: Mapping[str, np.ndarray], tasks: Sequence[str], device: torch.device
) -> dict[str, Any]:
    """Return the policy's input for the rows of a batch, with `tasks` as their instructions."""
    prepared = preprocessor({TASK: list(tasks), **_observed(batch)})
    # Processors are saved for one device, often the CPU.
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in prepared.items()}


def _observed(batch: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return observations like `LeRobotDataset`, with integers as float32 like `processors.Prepare`."""
    tensors = {}
    for key, values in batch.items():
        if key.startswith(OBS_PREFIX):
            tensor = torch.from_numpy(np.array(values))
            if tensor.dtype == torch.uint8 and tensor.ndim >= 4:
                tensor = to_float(tensor)
            elif not tensor.is_floating_point() and not key.endswith("_is_pad"):
                tensor = tensor.float()
            tensors[key] = tensor
    return tensors


def _predict(policy: PreTrainedPolicy, observation: dict[str, Any], seed: tuple[int, int]) -> torch.Tensor:
    """Predict normalised chunks (N, T, A) with noise from `seed`."""
    device = next(policy.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]))
        return family_of(policy.config).predict_chunk(policy, observation)


class _ErrorSum:
    """Running sums of squared and absolute errors over action steps without padding."""

    def __init__(self) -> None:
        self.frames = self.actions = 0
        self.squared: Any = 0.0
        self.absolute: Any = 0.0

    def add(self, predicted: np.ndarray, recorded: np.ndarray, counted: np.ndarray) -> None:
        """Add the errors of `predicted` and `recorded`, float64 (N, T, A), where `counted`, bool (N, T)."""
        if predicted.shape != recorded.shape:
            raise ValueError(
                f"the policy predicts chunks of shape {predicted.shape}, the dataset's are {recorded.shape} "
                "(frames, actions per chunk, dimensions): read it with the policy's own chunk size"
            )
        difference = (predicted - recorded)[counted]
        self.frames += len(recorded)
        self.actions += len(difference)
        self.squared = self.squared + (difference**2).sum(axis=0)
        self.absolute = self.absolute + np.abs(difference).sum(axis=0)

    def mean(self) -> dict[str, Any] | None:
        if not self.actions:
            return None
        return {"mse": float(self.squared.mean() / self.actions), "mae": (self.absolute / self.actions).tolist()}


def error_table(trained: Mapping[str, Any], untrained: Mapping[str, Any] | None = None) -> str:
    """Format `open_loop_errors` of the trained policy and of its base policy as a run's final table."""
    baseline = trained["mean_action"]["mse"]
    rows = [("mean action (a)", trained["mean_action"])]
    rows += [] if untrained is None else [("before training (b)", untrained["policy"])]
    rows += [("trained", trained["policy"]), ("trained, with another instruction (c)", trained["other_instruction"])]
    width = max(len(name) for name, _ in rows)
    lines = [f"Open-loop error of the action chunk on {trained['frames']} held-out frames"]
    lines.append(f"  {'':{width}}  {'MSE':>10}  relative to (a)")
    for name, error in rows:
        if error is None:
            lines.append(f"  {name:{width}}  {'-':>10}  the dataset has one instruction only")
        else:
            relative = error["mse"] / baseline if baseline else float("nan")
            lines.append(f"  {name:{width}}  {error['mse']:10.4g}  {relative:15.3f}")
    return "\n".join(lines)


def held_out_frames(rows: Rows, limit: int = EVAL_FRAMES) -> Iterator[dict[str, Any]]:
    """Return `episode_frames` of the first held-out episode, with stored image sizes. Raises ValueError if none is."""
    number = next((n for n, held_out in enumerate(rows.eval_episodes) if len(held_out)), None)
    if number is None:
        raise ValueError("no episode is held out: give --dataset.eval_split")
    features = replace(rows.features, delta_timestamps={}, image_size=None)
    reading = Reading(frame_cache=rows.reading.frame_cache)
    return episode_frames(rows.metas[number], int(rows.eval_episodes[number][0]), features, reading, limit)


def episode_frames(
    meta: DatasetMetadata, episode: int, features: Features, reading: Reading, limit: int
) -> Iterator[dict[str, Any]]:
    """Yield at most `limit` frames of an episode like `LeRobotDataset`: `task`, observations and `action` (A,)."""
    source = LeRobotDatasource([meta], Selection(episodes=[[episode]]), features, reading=reading)
    for row in source.read_rows(range(min(int(meta.episode_length[episode]), limit)), batch_size=1):
        observed = {key: tensor[0] for key, tensor in _observed(row).items()}
        yield {TASK: str(row[TASK][0]), **observed, ACTION: torch.from_numpy(row[ACTION][0].copy())}


def _mean_action(spec: PolicySpec, batches: list[dict[str, np.ndarray]]) -> np.ndarray:
    """Return the mean action of the statistics; for relative actions, the mean of the batches."""
    stats = spec.robots[0].stats
    if relative_actions(spec.config) is None and stats is not None:
        return stats[ACTION]["mean"]
    return np.concatenate([batch[ACTION][:, 0] for batch in batches]).mean(0)


def evaluate_run(run: Run, frames: int = EVAL_FRAMES) -> dict[str, Any]:
    """Measure a finished run on its held-out episodes, before and after training, and write `evaluation.json`.

    Runs in a process of its own, on a GPU if the run had GPUs. LeRobot's own code loads the trained policy from
    `OUTPUT_DIR/pretrained_model`.

    Returns:
        `{"trained", "untrained"}` from `open_loop_errors` and `"tools"` from `compare_tools`; for several robots
        `{"robots": {name: the same}}`, for robots with held-out episodes.
    """
    folder = fetched_for_good(run.job.output_dir / "pretrained_model")
    views = {robot.name: (select_robot(run, robot), robot.datasets) for robot in run.robots}
    robot_errors = {
        name: _errors_of(view, datasets, folder / name, frames)
        for name, (view, datasets) in views.items()
        if view.rows.any_held_out
    }
    errors: dict[str, Any] = {"robots": robot_errors} if run.policy.mixes_robots else robot_errors[""]
    write_json(path := run.job.output_dir / EVALUATION_NAME, errors)
    push(path)
    return errors


def _errors_of(run: Run, datasets: Sequence[int], folder: Path, frames: int) -> dict[str, Any]:
    """Measure the run's only robot, whose policy is in `folder`; `datasets`: indices in the whole run."""
    job, rows, spec, (robot,) = run.job, run.rows, run.policy, run.robots
    source, batches = rows.held_out(check_files=True), []
    # The training's batch size fits the GPU.
    size = min(EVAL_BATCH, job.batch_size) if job.use_gpu and family_of(spec.config).from_config else EVAL_BATCH
    for batch in source.read_rows(evenly_spaced(source.plan.rows_per_epoch, frames).tolist(), size):
        read = ~batch.pop(IS_SKIPPED, np.zeros(len(batch["index"]), bool))
        if read.any():
            task = np.array([f"{robot.opening}{text}" for text in batch[TASK]], object)
            columns = {**batch, TASK: task, "dataset_index": np.array(datasets)[batch["dataset_index"]]}
            batches.append({key: values[read] for key, values in columns.items()})
    if not batches:
        raise ValueError("none of the held-out episodes can be read")
    device = torch.device("cuda" if job.use_gpu else "cpu")
    options: dict[str, Any] = {
        "mean_action": _mean_action(spec, batches),
        "other_instruction": other_instructions(
            f"{robot.opening}{task}"
            for meta, episodes in zip(rows.metas, rows.episodes, strict=True)
            for task in tasks_of(meta, episodes)
        ),
        "seed": spec.seed,
    }
    saved = load_policy_config(folder)
    saved.device = device.type
    options["autocast"] = autocast = autocast_dtype(spec.train.precision, device)
    pre, post = load_processors(folder, saved, trusted=spec.trusted)
    with remote_code(spec.trusted):
        trained = get_policy_class(saved.type).from_pretrained(folder, config=saved)
    errors: dict[str, Any] = {}
    try:
        errors["tools"] = _compare_tools(trained.to(device), folder, rows, robot, spec)
    except torch.OutOfMemoryError:
        errors["tools"] = {"LeRobot's tools": "not tried: the weights as LeRobot loads them do not fit this GPU"}
        trained.to("cpu")  # to be cast there
    trained = _placed(spec, trained, autocast, device)
    named = [_by_own_names(robot, batch) for batch in batches]
    errors["trained"] = open_loop_errors(trained, pre, post, named, **options)
    del trained
    if spec.folder is not None:
        untrained = _placed(spec, spec.start(), autocast, device)
        pre, post = spec.processors()
        options["other_instruction"] = None
        errors["untrained"] = open_loop_errors(untrained, pre, post, batches, **options)
    return errors


def _by_own_names(robot: Robot, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return features under the robot's own names."""
    return {robot.own_names.get(key, key): values for key, values in columns.items()}


def _compare_tools(
    policy: PreTrainedPolicy, folder: Path, rows: Rows, robot: Robot, spec: PolicySpec
) -> dict[str, Any]:
    """Return `compare_tools` over the first held-out episode, with weights in LeRobot's precision."""
    try:
        frames = list(held_out_frames(rows, MOST_STEPS))
    except (ValueError, OSError) as error:  # with --dataset.on_error=skip no error of the evaluation
        return {"LeRobot's tools": f"not tried, the first held-out episode cannot be read: {error}"}
    frames = [{**_by_own_names(robot, frame), TASK: f"{robot.opening}{frame[TASK]}"} for frame in frames]
    return compare_tools(policy, folder, frames, trusted=spec.trusted)


def _placed(
    spec: PolicySpec, policy: PreTrainedPolicy, autocast: torch.dtype | None, device: torch.device
) -> PreTrainedPolicy:
    """Move a policy to the device, with frozen parameters in the precision of the training, so that it fits."""
    if family_of(policy.config).from_config and autocast is not None:
        choose_trainable(policy, spec.train.mode)
        cast_frozen(policy, autocast)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of the policy before it
    return policy.to(device)
