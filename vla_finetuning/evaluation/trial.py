"""Resolve, run, record and compare evaluations (`evaluate.py`). Runs on the driver."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from lerobot.configs.policies import PreTrainedConfig
from lerobot.envs.configs import EnvConfig
from lerobot.policies.rtc import RTCConfig

from vla_finetuning.buckets.mirror import address, as_path, pull
from vla_finetuning.envs.configs import env_config, task_makers
from vla_finetuning.envs.protocol import Maker
from vla_finetuning.evaluation.episodes import EvaluationFolder, read_actions, read_evaluation
from vla_finetuning.evaluation.intervals import comparison_text, score, share
from vla_finetuning.files import read_json, write_json
from vla_finetuning.options.policy import RELATIVE_PLAYED_BY
from vla_finetuning.options.programs import EvaluateConfig
from vla_finetuning.plan.base_policy import resolve_policy
from vla_finetuning.plan.statistics import relative_actions
from vla_finetuning.policies.family import MAX_DELAY
from vla_finetuning.policies.loading import load_policy_config
from vla_finetuning.policies.pipelines import saved_rename_map
from vla_finetuning.rollouts.episodes import Condition, Episode, Line, episode_key, episode_list
from vla_finetuning.rollouts.player import (
    Eyes,
    PolicySource,
    check_delay,
    check_plays,
    check_rtc,
    robot_shown,
    rtc_options,
)
from vla_finetuning.rollouts.recording import is_recorded, record_played
from vla_finetuning.rollouts.replay import make_films
from vla_finetuning.rollouts.servers import play
from vla_finetuning.run.exported import exported_robots
from vla_finetuning.run.folder import FILMS_INDEX, check_place
from vla_finetuning.terminal import escaped, print_safe

# Interval of progress lines.
PROGRESS_EVERY_S = 10.0


@dataclass(frozen=True)
class Trial:
    """A resolved evaluation.

    Attributes:
        conditions: conditions by name, one per latency.
        about: all that decides the results, as JSON.
        dataset: folder of the dataset to record; None: no dataset.
    """

    config: EvaluateConfig
    output_dir: Path
    env: EnvConfig
    makers: Mapping[str, Maker]
    source: PolicySource
    episodes: list[Episode]
    conditions: dict[str, Condition]
    about: dict[str, Any]
    dataset: Path | None


def resolve_trial(config: EvaluateConfig) -> Trial:
    """Resolve and check policy and environment. Raises ValueError or FileNotFoundError with a remedy."""
    output_dir = as_path(config.output_dir or "").absolute()  # before the policy's folder, which may contain it
    env = env_config(config.env_type or "", config.env_options)
    makers = task_makers(env)
    policy_config, folder, base = resolve_policy(config, _policy_for(config.policy_path, env, config.rename_map))
    assert folder is not None  # there was a path
    check_plays(folder, policy_config, env, config.rename_map)
    controller = config.controller
    if controller == "select_action" and relative_actions(policy_config) is None:
        controller = "chunk"  # equal without relative actions
    if controller == "select_action" and config.eval.exact:
        raise ValueError(
            "--eval.exact with --eval.controller=select_action: chunks of these episodes begin at different steps, so "
            "batches are not full; leave one out"
        )
    if controller == "rtc":
        check_rtc(policy_config, config.guidance)
    conditions = _conditions(config, env, policy_config)
    if controller == "select_action":
        config = replace(config, eval=replace(config.eval, policy_actors=1))
    source = PolicySource.of_export(
        folder, policy_config, config, env=env, rename_map=config.rename_map, controller=controller
    )
    acting = {
        "advantage": config.advantage,
        "guidance": None if config.advantage is None else config.guidance,
        "subtask": config.subtask or None,
        "controller": None if controller == "chunk" else controller,
        "latency_s": config.latency_s or None,
    }
    chosen = {name: value for name, value in acting.items() if value is not None}
    about = {
        "policy": {**base, "options": config.policy_options, "rename_map": config.rename_map, **chosen},
        "environment": {"type": config.env_type, "options": config.env_options},
        "seed": config.seed,
    }
    check_place(output_dir)
    trial = Trial(
        config=config,
        output_dir=output_dir,
        env=env,
        makers=makers,
        source=source,
        episodes=episode_list(conditions, makers, config.eval.n_episodes, config.seed),
        conditions=conditions,
        about=about,
        dataset=None if config.record_dataset is None else Path(config.record_dataset).expanduser().absolute(),
    )
    if trial.dataset is not None:
        is_recorded(trial.dataset, {**about, "episodes": len(trial.episodes)})
    return trial


def _conditions(config: EvaluateConfig, env: EnvConfig, policy_config: PreTrainedConfig) -> dict[str, Condition]:
    """Return a condition per latency, named "plain" if there is one. Raises ValueError for a latency too long."""
    conditions = {}
    for latency_s in config.latency_s or [0.0]:
        delay = math.ceil(round(latency_s * env.fps, 6))  # 0.07 s at 100 Hz are 7 steps, despite rounding
        if delay > 0 or config.controller == "rtc":
            check_delay(policy_config, latency_s, delay, config.controller)
        name = "plain" if len(config.latency_s) < 2 else f"latency {latency_s:g} s"
        conditions[name] = Condition(delay=delay)
    return conditions


def _policy_for(path: str | None, env: EnvConfig, rename_map: Mapping[str, str]) -> str | None:
    """Return the policy's path; for an export of several robots, the folder of the environment's robot."""
    folder = as_path(path or "")
    names = exported_robots(folder) if path else []
    if not names:
        return path
    policies = {}
    for name in names:
        pull(folder / name, at_the_top=True)
        policies[name] = load_policy_config(folder / name), {**saved_rename_map(folder / name), **rename_map}
    try:
        return address(folder / robot_shown(env, policies))
    except ValueError as error:
        raise ValueError(f"{path}: {error}; give the folder of one") from error


def run_trial(trial: Trial, write_page: Callable[..., None]) -> tuple[str, int]:
    """Play all remaining episodes, make films and write the page, on the cluster that this process has joined.

    Return success as text for the terminal, and the number of episodes that ended in an error. `write_page` is
    `report.page.write_trial_page`.
    """
    latencies = dict(zip(trial.conditions, trial.config.latency_s, strict=False))
    stored = EvaluationFolder(trial.output_dir, trial.about, trial.episodes)
    pending, began, outcomes = stored.pending, time.monotonic(), list[bool]()
    reported = began

    def on_end(line: Line, actions: np.ndarray | None) -> None:
        nonlocal reported
        if latencies:
            line = {**line, "latency_s": latencies[line["condition"]]}
        stored.write(line, actions if trial.config.videos or trial.dataset else None)
        outcomes.append(bool(line["success_once"]))
        now, played, count = time.monotonic(), len(outcomes), len(trial.episodes)
        if now - reported >= PROGRESS_EVERY_S:
            reported, done = now, count - len(pending) + played
            left_s = (count - done) * (now - began) / played
            print_safe(f"{done} of {count} episodes, {sum(outcomes)} of {played} succeeded, {left_s:.0f} s left")

    if pending:
        play(
            pending,
            trial.conditions,
            {"policy": trial.source.shared()},
            trial.makers,
            trial.config.eval,
            seed=trial.config.seed,
            on_end=on_end,
        )
    _, lines = read_evaluation(trial.output_dir)
    if pending or read_json(trial.output_dir / FILMS_INDEX).get("videos") != trial.config.videos:
        _film(trial, lines)
    by_latency: dict[float | None, list[Line]] = {}
    for line in sorted(lines, key=lambda line: line.get("latency_s", 0.0)):
        by_latency.setdefault(line.get("latency_s"), []).append(line)
    scores = {latency_s: score_rows(rows) for latency_s, rows in by_latency.items()}
    write_page(trial.output_dir, trial.about, scores, read_json(trial.output_dir / FILMS_INDEX)["films"])
    texts = [success_text(rows, latency_s) for latency_s, rows in by_latency.items()]
    text = "\n".join([*texts, *describe_controller(trial.source)])
    return text, sum(line["error"] is not None for line in lines)


def describe_controller(source: PolicySource) -> list[str]:
    """Describe the controller in lines, if controllers differ for the policy."""
    if source.controller == "rtc":
        if getattr(source.config, MAX_DELAY, 0):
            how = f"given the actions that are executed meanwhile, as in training (--policy.{MAX_DELAY})"
        else:
            how = f"guided to the rest of the one before, as by lerobot-rollout with {flags_of_rtc(source.config)}"
        return [f"Controller   rtc: each chunk was {how}"]
    if relative_actions(source.config) is None:
        return []
    if source.controller == "select_action":
        return ["Controller   select_action: relative actions were added to the current state, as by lerobot-eval"]
    return [
        f"Controller   chunk: relative actions were played as by {RELATIVE_PLAYED_BY}: --eval.controller=select_action"
    ]


def flags_of_rtc(config: Any) -> str:
    """Return the flags of lerobot-rollout that guide and replace chunks alike."""
    options, defaults = (asdict(which) for which in (rtc_options(config), RTCConfig()))
    changed = {f"rtc.{name}": value for name, value in options.items() if value != defaults[name]}
    flags = {"queue_threshold": config.chunk_size - config.n_action_steps, **changed}
    return " ".join(f"--inference.{name}={getattr(value, 'value', value)}" for name, value in flags.items())


def record_trial(trial: Trial) -> None:
    """Record the episodes as a dataset, if requested and not done. Raises ValueError if no actions were stored."""
    if (root := trial.dataset) is None:
        return
    _, lines = read_evaluation(trial.output_dir)
    played = [line for line in lines if line["error"] is None]
    about = {**trial.about, "episodes": len(lines), "errors": len(lines) - len(played)}
    if is_recorded(root, about):
        return
    if not played:
        raise ValueError(f"--eval.record_dataset: each of {len(lines)} episodes ended in an error; nothing is written")
    actions = read_actions(trial.output_dir)
    if missing := sum(episode_key(line) not in actions for line in played):
        raise ValueError(
            f"{address(trial.output_dir)} has no actions of {missing} episodes, which were played without "
            "--eval.record_dataset: give another --output_dir"
        )
    eyes = Eyes(trial.env, trial.source.config)
    record_played(root, trial.makers, eyes, [(line, actions[episode_key(line)]) for line in played], about)


def _film(trial: Trial, lines: Sequence[Mapping[str, Any]]) -> None:
    """Make films of the episodes of `select_films` with stored actions, and write films.json."""
    stored, selected, chosen = read_actions(trial.output_dir), select_films(lines, trial.config.videos), []
    for line in selected:
        if (actions := stored.get(episode_key(line))) is not None:
            title = line["task"] if len(trial.conditions) == 1 else f"{line['task']}, {line['condition']}"
            chosen.append((title, line, actions))
    if missing := len(selected) - len(chosen):
        print_safe(f"Films        {missing} are missing: their episodes were played with --eval.videos 0")
    films = make_films(trial.output_dir, trial.makers, chosen) if chosen else []
    write_json(trial.output_dir / FILMS_INDEX, {"videos": trial.config.videos, "films": films})


def select_films(lines: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """Select at most `most` failures, then half as many successes, cycling through the tasks."""
    chosen = []
    for success, limit in ((False, most), (True, math.ceil(most / 2))):
        by_task: dict[str, list[Mapping[str, Any]]] = {}
        for line in lines:
            if line["error"] is None and line["success_once"] is success:
                by_task.setdefault(line["task"], []).append(line)
        in_turn = [line for some in itertools.zip_longest(*by_task.values()) for line in some if line is not None]
        chosen += in_turn[:limit]
    return chosen


def score_rows(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the score of all episodes, then by task, or by instruction if there is one task, with labels."""
    part = "task" if len({line["task"] for line in lines}) > 1 else "instruction"
    names = list(dict.fromkeys(line[part] for line in lines if line[part] is not None))
    groups = [("all episodes", list(lines))]
    if len(names) > 1:
        groups += [(name, [line for line in lines if line[part] == name]) for name in names]
    return [{"label": label, **score(group)} for label, group in groups]


def success_text(lines: Sequence[Mapping[str, Any]], latency_s: float | None = None) -> str:
    """Format an evaluation's result: success overall and by task or instruction, and failed episodes."""
    played = [line for line in lines if line["error"] is None]
    every, *parts = score_rows(lines)
    at = "" if latency_s is None else f"; latency {latency_s:g} s"
    text = [f"Success      {share(every)}{at}"]
    text += [f"             {share(part)}  {escaped(part['label'])}" for part in parts]
    if at_reset := sum(line["success_at_reset"] for line in played):
        text.append(f"             {at_reset} of them succeeded before the first action")
    failed = [line for line in lines if line["error"] is not None]
    for line in failed[:5]:
        text.append(f"Not played   {escaped(line['task'])}, seed {line['seed']}: {escaped(line['error'])}")
    if failed:
        text.append(f"             {len(failed)} episodes ended in an error; the same command plays them again")
    return "\n".join(text)


def compare_folders(a: Path, b: Path) -> tuple[str, int]:
    """Compare two evaluations; return the text for the terminal, and the number of failed episodes in both.

    Raises ValueError if the environments, lists of episodes or latencies differ, or an evaluation is not finished.
    """
    (about_a, lines_a), (about_b, lines_b) = read_evaluation(a), read_evaluation(b)
    env_a, env_b = (about.get("environment") for about in (about_a, about_b))
    if env_a and env_b and _options_of(env_a) != _options_of(env_b):
        flags = (" ".join([f"--type={env['type']}", *env["options"]]) for env in (env_a, env_b))
        raise ValueError(
            f"the environments differ, {' and '.join(map(escaped, flags))}: give the same --env.* for both, so that "
            "only the policies differ"
        )
    conditions_a, conditions_b = (dict.fromkeys(line["condition"] for line in lines) for lines in (lines_a, lines_b))
    if conditions_a != conditions_b:
        raise ValueError("they were played at other latencies: give both the same --eval.latency_s, or one value each")
    texts = []
    for name in conditions_a:
        of_a, of_b = ([line for line in lines if line["condition"] == name] for lines in (lines_a, lines_b))
        texts += [f"At a {name}"] if len(conditions_a) > 1 else []
        texts.append(comparison_text(of_a, of_b, escaped(address(a)), escaped(address(b))))
    missing = sum(line["error"] is not None for line in (*lines_a, *lines_b))
    return "\n".join(texts), missing


def _options_of(env: Mapping[str, Any]) -> tuple[str, set[str]]:
    """Return an environment's type and options, without --task where the list of episodes names the tasks."""
    is_named = env["type"] in ("libero", "metaworld")
    return env["type"], {option for option in env["options"] if not (is_named and option.startswith("--task="))}
