"""Resolve and check a run of `value.py` before Ray starts; after training, write and score its labels of frames."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import mannwhitneyu, t

from vla_finetuning.data.metadata import DatasetMetadata
from vla_finetuning.evaluation.intervals import CONFIDENCE
from vla_finetuning.options.fields import decided, get_option
from vla_finetuning.options.programs import ValueConfig
from vla_finetuning.plan.datasets import Datasets, find_datasets, without_labels
from vla_finetuning.plan.describe import describe
from vla_finetuning.plan.episodes import choose
from vla_finetuning.plan.labels import write_labels
from vla_finetuning.plan.outcomes import corrected_frames, episode_success, intervention_columns
from vla_finetuning.plan.paths import absolute
from vla_finetuning.plan.resolve import Run, make_job, resolve
from vla_finetuning.plan.rows import PerFrame
from vla_finetuning.policies.meta import meta_policy
from vla_finetuning.policies.registry import family_of, types_that
from vla_finetuning.policies.spec import PolicySpec, ValueSpec
from vla_finetuning.policies.trainable import TrainableReport
from vla_finetuning.policies.value import ValueLoss
from vla_finetuning.rl.judging import judge_frames
from vla_finetuning.rl.returns import advantages, episode_returns, label_positive
from vla_finetuning.run.exported import LABELS_NAME
from vla_finetuning.run.job import Job
from vla_finetuning.terminal import escaped

IN_SAMPLE = "in-sample"
# Below this AUROC the terminal warns. In the demo, labels of a value function at 0.74 taught nothing.
LOW_AUROC = 0.9


@dataclass(frozen=True)
class ValueRun:
    """A resolved run of `value.py`.

    Attributes:
        training: the run of `vla.train`; its policy is the value function, its rows have returns.
        success, tasks: outcome and task number of each episode, bool and int64 (E,) for each dataset.
        corrected, returns: mask of corrections and return of each frame, bool and float32 (F,) for each dataset.
    """

    config: ValueConfig
    training: Run
    success: tuple[np.ndarray, ...]
    corrected: tuple[np.ndarray, ...]
    tasks: tuple[np.ndarray, ...]
    returns: tuple[np.ndarray, ...]

    @property
    def job(self) -> Job:
        return self.training.job


def resolve_value(config: ValueConfig, gpus_found: int | None = None, datasets: Datasets | None = None) -> ValueRun:
    """Find, read and check everything that the run needs, but for `datasets` that `preflight.examine` has found.

    Raises ValueError or FileNotFoundError, which name the remedy.
    """
    options = config.training()
    if datasets is None:
        options, datasets = find_datasets(options)
    metas = tuple(map(without_labels, datasets.metas))
    if len(rates := {meta.fps: meta.root for meta in metas}) > 1:
        (a, first), (b, second), *_ = rates.items()
        raise ValueError(
            f"datasets {first} and {second} have {a} and {b} frames per second, and returns and --value.horizon count "
            "frames: give value.py datasets of one rate"
        )
    episodes = [chosen for chosen, _ in choose(options, datasets)]
    success = episode_success(config.outcome, metas, episodes, datasets.roots, absolute)
    corrected = corrected_frames(config.outcome, metas, episodes)
    outcomes = _select_outcomes(success, episodes)
    if outcomes.all() or not outcomes.any():
        raise ValueError(
            f"--outcome.success={config.outcome.success} (--outcome.threshold={config.outcome.threshold:g}): all "
            f"{len(outcomes)} episodes {'succeeded' if outcomes.all() else 'failed'}, which leaves nothing to compare; "
            "add episodes of the other outcome, or correct --outcome.success or --outcome.threshold"
        )
    # The parameters that train are chosen below, not by the policy's options.
    run = resolve(options, gpus_found, replace(datasets, metas=metas, success=success), freezes_by_mode=False)
    policy, rows = run.policy, run.rows
    if not family_of(policy.config).flow:
        raise ValueError(
            f"policy {policy.base['path']} is of type '{policy.config.type}': a value function needs the features "
            f"that {types_that(lambda family: family.flow)} compute of images and language; "
            "give a --policy.path of one of these types"
        )
    tasks = _task_numbers(rows.metas)
    longest = _longest(rows.metas, rows.episodes, tasks)
    returns = tuple(
        episode_returns(meta.episode_length, succeeded, longest[task], config.value.failure_penalty)
        for meta, succeeded, task in zip(rows.metas, success, tasks, strict=True)
    )
    rows = replace(
        rows,
        returns=PerFrame(returns),
        identity={
            **rows.identity,
            "value": {name: getattr(config.value, name) for name in ("bins", "failure_penalty", "backbone")},
            "successes": hashlib.sha256(np.concatenate(success).tobytes()).hexdigest(),
        },
    )
    spec = ValueSpec(config.value.bins, config.value.backbone_lr if config.value.backbone else None)
    policy = replace(policy, value=spec, flops_by_prompt={}, parameters=_count(policy, spec))
    job = make_job(run.config, policy, run.job.steps, rows.identity)
    training = replace(run, policy=policy, rows=rows, job=job)
    config = decided(config, {path: get_option(run.config, path) for path in run.config.given})
    return ValueRun(config, training, success, corrected, tasks, returns)


def _select_outcomes(success: Sequence[np.ndarray], episodes: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate the outcomes of the chosen episodes of each dataset, bool (E,)."""
    return np.concatenate([outcomes[selected] for outcomes, selected in zip(success, episodes, strict=True)])


def _task_numbers(metas: Sequence[DatasetMetadata]) -> tuple[np.ndarray, ...]:
    """Number the tasks of all datasets by their instructions; return int64 (E,) for each dataset."""
    numbers: dict[str, int] = {}
    return tuple(
        np.array([numbers.setdefault((texts or ("",))[0], len(numbers)) for texts in meta.episode_tasks], np.int64)
        for meta in metas
    )


def _longest(
    metas: Sequence[DatasetMetadata], episodes: Sequence[np.ndarray], tasks: Sequence[np.ndarray]
) -> np.ndarray:
    """Return the number of frames of each task's longest episode, int64 (tasks,)."""
    longest = np.ones(1 + max(int(task.max()) for task in tasks), np.int64)
    for meta, selected, task in zip(metas, episodes, tasks, strict=True):
        np.maximum.at(longest, task[selected], meta.episode_length[selected])
    return longest


def _count(policy: PolicySpec, spec: ValueSpec) -> TrainableReport:
    loss: Any = family_of(policy.config).make_loss(meta_policy(policy.config))
    with torch.device("meta"):
        value = ValueLoss(loss, spec.bins, 0, spec.backbone_lr is not None)
    numbers = [(parameter.numel(), parameter.requires_grad) for parameter in value.parameters()]
    total, trained = sum(number for number, _ in numbers), sum(number for number, trains in numbers if trains)
    return TrainableReport(total, trained, {"the policy": total - trained})


def describe_value(run: ValueRun) -> str:
    rows, v = run.training.rows, run.config.value
    used, held_out = (_select_outcomes(run.success, episodes) for episodes in (rows.episodes, rows.eval_episodes))
    corrected = sum(int(frames.sum()) for frames in run.corrected)
    columns = sorted({key for key in intervention_columns(run.config.outcome, rows.metas) if key})
    judged = (
        "on which its AUROC is measured" if 0 < held_out.sum() < len(held_out) else f"too few: its AUROC is {IN_SAMPLE}"
    )
    lines = [
        f"Outcomes     {used.sum()} of {len(used)} episodes succeeded, by {run.config.outcome.success}"
        + (f"; {corrected} frames are corrections, by {' and '.join(columns)}" if columns else ""),
        f"             {held_out.sum()} of {len(held_out)} held-out episodes succeeded, {judged}",
        f"Value        {v.bins} bins of the return, in lengths of the task's longest episode; a failure costs "
        f"{v.failure_penalty:g}",
        f"Labels       advantages over {v.horizon} frames; {v.positive:.0%} of each task's frames positive",
    ]
    return "\n".join([describe(run.training), *map(escaped, lines)])


# ---- labels ----------------------------------------------------------------------------------------------------------


def label_frames(run: ValueRun, training: Run, checkpoint: Path) -> str:
    """Compute the values of all frames with a checkpoint, write their labels with scores, and return a summary.

    `training` is `run.training` with its computed statistics.
    """
    rows, v = training.rows, run.config.value
    length = np.concatenate([meta.episode_length for meta in rows.metas])
    in_run, held_out = (
        np.concatenate([np.isin(meta.episode_index, chosen) for meta, chosen in zip(rows.metas, episodes, strict=True)])
        for episodes in (rows.episodes, rows.eval_episodes)
    )
    frames, length = np.repeat(in_run, length), length[in_run]
    frame_columns: dict[str, Sequence[np.ndarray]] = {
        "intervention": run.corrected,
        "return": run.returns,
        "value": judge_frames(training, checkpoint),
    }
    episode_columns = {"success": np.concatenate(run.success), "held_out": held_out}
    columns = {name: np.repeat(column[in_run], length) for name, column in episode_columns.items()}
    columns |= {name: np.concatenate(parts)[frames] for name, parts in frame_columns.items()}
    if missing := np.isnan(columns["value"]).sum():
        raise RuntimeError(f"{missing} frames of {', '.join(meta.root for meta in rows.metas)} were not judged")
    columns["advantage"] = advantages(columns["return"], columns["value"], length, v.horizon)
    task = np.repeat(np.concatenate(run.tasks)[in_run], length)
    columns["positive"] = label_positive(columns["advantage"], task, columns["intervention"], v.positive)
    to_come = np.repeat(np.cumsum(length), length) - np.arange(length.sum()) - 1
    scores = score_labels(columns, to_come, v.horizon)
    write_labels(training.job.output_dir / LABELS_NAME, rows.metas, rows.episodes, columns, scores)
    return labels_text(scores)


def score_labels(columns: Mapping[str, np.ndarray], to_come: np.ndarray, horizon: int) -> dict[str, Any]:
    """Return shares of positive labels, and how well advantages and values separate failures from successes.

    An advantage whose horizon reaches the episode's end contains the outcome; such frames are left out of `auroc`.

    `auroc` is of the negative advantage for failed episodes, `auroc_last` of the negative value in last frames. Both
    have `_held_out`, with interval `_low` to `_high`, and `_in_sample`; None if an outcome is missing.

    Args:
        columns: (F,) each, as in the file of labels, and `held_out`.
        to_come: number of later frames of the episode, int (F,).
    """
    failed, held_out = ~columns["success"], columns["held_out"]
    episode = np.cumsum(to_come == 0) - (to_come == 0)
    scores: dict[str, float | None] = {
        "frames": len(failed),
        "horizon": horizon,
        "positive": float(columns["positive"].mean()),
        "positive_of_successes": float(columns["positive"][~failed].mean()),
        "positive_of_failures": float(columns["positive"][failed].mean()),
    }
    for name, column, mask in (("auroc", "advantage", to_come >= horizon), ("auroc_last", "value", to_come == 0)):
        for kind, chosen in (("held_out", mask & held_out), ("in_sample", mask & ~held_out)):
            scores[f"{name}_{kind}"] = auroc(-columns[column][chosen], failed[chosen])
        if (score := scores[f"{name}_held_out"]) is not None:
            numbers = (_effective_episodes(episode[mask & held_out & outcome]) for outcome in (failed, ~failed))
            scores[f"{name}_low"], scores[f"{name}_high"] = auroc_interval(score, *numbers)
    return scores


def auroc(score: np.ndarray, truth: np.ndarray) -> float | None:
    """Return the probability that a true row has a higher score than a false one, ties as half; None without both."""
    if truth.all() or not truth.any():
        return None
    positives, negatives = score[truth], score[~truth]
    return float(mannwhitneyu(positives, negatives).statistic / len(positives) / len(negatives))


def _effective_episodes(episode: np.ndarray) -> float:
    """Return the effective number of episodes (Kish), given the episode of each frame."""
    frames = np.unique(episode, return_counts=True)[1]
    return float(frames.sum() ** 2 / (frames**2).sum())


def auroc_interval(score: float, positives: float, negatives: float) -> tuple[float, float]:
    """Return Newcombe's interval of an AUROC (method 5, doi 10.1002/sim.2324) of so many independent rows.

    As Wilson's, it contains every AUROC from which `score` deviates by no more than the quantile. The quantile is
    Student's, because rows may be few.
    """
    theta, extra = np.append(np.linspace(0, 1, 10_001), score), (positives + negatives) / 2 - 1
    spread = 1 + extra * ((1 - theta) / (2 - theta) + theta / (1 + theta))
    quantile = t.ppf((1 + CONFIDENCE) / 2, max(positives + negatives - 2, 0.1))
    deviation = quantile * np.sqrt(theta * (1 - theta) * spread / (positives * negatives))
    inside = theta[np.abs(theta - score) <= deviation]
    return float(inside.min(initial=score)), float(inside.max(initial=score))


def labels_text(scores: Mapping[str, Any]) -> str:
    """Return the lines that `value.py` ends with."""
    texts = [_format_auroc(scores, name) for name in ("auroc", "auroc_last")]
    note = "; too few episodes are held out: raise --dataset.eval_split, or add episodes of the rarer outcome"
    lines = [
        f"Positive     {scores['positive']:.1%} of {scores['frames']} frames: "
        f"{scores['positive_of_successes']:.1%} of successful episodes', "
        f"{scores['positive_of_failures']:.1%} of failed ones'",
        f"AUROC        for failed episodes: {texts[0]} of advantages over {scores['horizon']} frames "
        f"of an episode, {texts[1]} of the values of its last frame" + (note if IN_SAMPLE in "".join(texts) else ""),
    ]
    if (score := scores["auroc_held_out"]) is not None and score < LOW_AUROC:
        remedy = "train it for more --steps, or with --value.backbone true"
        if scores["auroc_low"] <= 0.5 <= scores["auroc_high"]:
            remedy = "its interval holds 0.5, which is chance: add episodes before anything else"
        lines.append(
            f"             BELOW {LOW_AUROC}: it hardly tells failures from successes before an episode ends, and "
            f"labels of earlier frames say little; {remedy}"
        )
    return "\n".join(lines)


def _format_auroc(scores: Mapping[str, Any], name: str) -> str:
    if (score := scores[f"{name}_held_out"]) is not None:
        return f"{score:.3f} ({scores[f'{name}_low']:.3f} to {scores[f'{name}_high']:.3f}, on held-out episodes)"
    score = scores[f"{name}_in_sample"]
    return "unknown" if score is None else f"{score:.3f} {IN_SAMPLE}"
