"""An evaluation from its flags: `evaluate.py` in the parts that it names, and the demo's own.

Runs on the driver. What is wrong with policy, environment or their fit is said before a process is started.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from lerobot.configs.policies import PreTrainedConfig
from lerobot.envs.configs import EnvConfig
from lerobot.policies.rtc import RTCConfig
from tqdm import tqdm

from vla_finetuning.buckets.mirror import address, as_path, pull
from vla_finetuning.envs.configs import DISCOVER, check_drawn, drawn_for, env_config, task_makers
from vla_finetuning.envs.protocol import Maker
from vla_finetuning.evaluation.episodes import Book, read_actions, read_evaluation
from vla_finetuning.evaluation.intervals import comparison_text, score, share
from vla_finetuning.files import read_json, write_json
from vla_finetuning.options.environment import EvalOptions
from vla_finetuning.options.policy import RELATIVE_PLAYED_BY
from vla_finetuning.options.programs import EvaluateConfig
from vla_finetuning.plan.base_policy import resolve_policy
from vla_finetuning.plan.statistics import relative_actions
from vla_finetuning.policies.family import MAX_DELAY
from vla_finetuning.policies.loading import load_policy_config
from vla_finetuning.policies.pipelines import saved_rename_map, saved_shapes
from vla_finetuning.rollouts.episodes import Condition, Episode, Line, episode_list, name_of
from vla_finetuning.rollouts.player import (
    Eyes,
    PolicySource,
    check_advantage,
    check_delay,
    check_fits,
    check_rename_map,
    check_rtc,
    check_writes,
    opening_of,
    own_shapes,
    rtc_options,
)
from vla_finetuning.rollouts.recording import is_recorded, record_played
from vla_finetuning.rollouts.replay import make_films
from vla_finetuning.rollouts.servers import play
from vla_finetuning.run.cluster import find_gpus
from vla_finetuning.run.exported import exported_robots
from vla_finetuning.run.folder import FILMS_INDEX, check_place
from vla_finetuning.terminal import escaped, print_safe

# Without a progress bar.
TELL_EVERY_S = 10.0


@dataclass(frozen=True)
class Trial:
    """A resolved evaluation.

    Attributes:
        conditions: those that episodes name, one for each latency.
        latencies: seconds, by condition; nothing where none was given.
        about: what decides its results, as JSON.
        dataset: where what the policy does is written as a dataset; None: nowhere.
        videos: failures that the page shows at most, and half as many successes.
    """

    output_dir: Path
    env: EnvConfig
    makers: Mapping[str, Maker]
    source: PolicySource
    episodes: list[Episode]
    conditions: dict[str, Condition]
    latencies: dict[str, float]
    options: EvalOptions
    seed: int
    about: dict[str, Any]
    dataset: Path | None = None
    videos: int = 0

    @property
    def recorded(self) -> dict[str, Any]:
        """What tells the dataset of its episodes from others, as JSON."""
        return {**self.about, "episodes": len(self.episodes)}


def resolve_trial(config: EvaluateConfig) -> Trial:
    """Find and check policy and environment.

    Raises:
        ValueError, FileNotFoundError: saying what to do.
    """
    env = env_config(config.env_type or "", config.env_options)
    makers = task_makers(env)
    policy_config, folder, base = resolve_policy(config, _policy_for(config.policy_path, env, config.rename_map))
    assert folder is not None  # there was a path
    check_rename_map(policy_config, env, config.rename_map)
    renamed = {**saved_rename_map(folder), **config.rename_map}
    check_fits(policy_config, env, renamed, saved_shapes(folder, policy_config))
    check_drawn(drawn_for(folder), env, folder)
    check_advantage(policy_config, config.advantage, config.guidance)
    check_writes(folder, policy_config, config.subtask)
    controller = config.controller
    if controller == "select_action" and relative_actions(policy_config) is None:
        controller = "chunk"  # which is the same
    if controller == "rtc":
        check_rtc(policy_config, config.guidance)
    conditions = _conditions(config, env, policy_config)
    options = replace(config.eval, policy_actors=1) if controller == "select_action" else config.eval
    use_gpu = find_gpus("--use_gpu") > 0 if config.use_gpu is None else config.use_gpu
    source = PolicySource(
        folder,
        policy_config,
        env=env,
        rename_map=config.rename_map,
        device="cuda" if use_gpu else "cpu",
        trusted=config.policy_trust_remote_code,
        opening=opening_of(folder),
        advantage=config.advantage,
        guidance=config.guidance,
        subtask=config.subtask,
        controller=controller,
    )
    acting_options: dict[str, Any] = (
        {} if config.advantage is None else {"advantage": config.advantage, "guidance": config.guidance}
    )
    acting_options |= {"subtask": True} if config.subtask else {}
    acting_options |= {"controller": controller} if controller != "chunk" else {}
    acting_options |= {"latency_s": config.latency_s} if config.latency_s else {}
    about = {
        "policy": {**base, "options": config.policy_options, "rename_map": config.rename_map, **acting_options},
        "environment": {"type": config.env_type, "options": config.env_options},
        "seed": config.seed,
    }
    episodes = episode_list(conditions, makers, config.eval.n_episodes, config.seed)
    output_dir = as_path(config.output_dir or "").absolute()
    check_place(output_dir)
    dataset = None if config.record_dataset is None else Path(config.record_dataset).expanduser().absolute()
    latencies = dict(zip(conditions, config.latency_s, strict=bool(config.latency_s)))
    trial = Trial(
        *(output_dir, env, makers, source, episodes, conditions, latencies, options, config.seed, about, dataset),
        videos=config.videos,
    )
    if dataset is not None:
        is_recorded(dataset, trial.recorded)
    return trial


def _conditions(config: EvaluateConfig, env: EnvConfig, policy_config: PreTrainedConfig) -> dict[str, Condition]:
    """Return a condition for each latency, "plain" where there is one. Raises ValueError for one that is too long."""
    conditions = {}
    for latency_s in config.latency_s or [0.0]:
        delay = math.ceil(round(latency_s * env.fps, 6))  # 0.07 s at 100 Hz are 7 steps, in binary too
        late = delay > 0 or config.controller == "rtc"
        if late:
            check_delay(policy_config, latency_s, delay, config.controller)
        name = "plain" if len(config.latency_s) < 2 else f"latency {latency_s:g} s"
        conditions[name] = Condition(delay=delay if late else None)
    return conditions


def _policy_for(path: str | None, env: EnvConfig, rename_map: Mapping[str, str]) -> str | None:
    """The policy's path; of what a run of several robots exported, that of the robot that the environment shows."""
    folder = as_path(path or "")
    names = exported_robots(folder) if path else []
    if not names:
        return path
    refused = {}
    for name in names:
        robot_folder = folder / name
        pull(robot_folder, at_the_top=True)
        try:
            policy_config = load_policy_config(robot_folder)
            check_fits(policy_config, env, {**saved_rename_map(robot_folder), **rename_map}, own_shapes(policy_config))
        except ValueError as error:
            refused[name] = str(error)
    fits = [name for name in names if name not in refused]
    if len(fits) != 1:
        why = f"fits {', '.join(fits)}" if fits else "; ".join(f"{name}: {error}" for name, error in refused.items())
        raise ValueError(f"{path} has policies of the robots {', '.join(names)}; give the folder of one ({why})")
    return address(folder / fits[0])


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    Attributes:
        text: success, for the terminal. errors: episodes that ended in an error.
        by_latency: `score_rows` of each latency in seconds; of None where none was given.
        films: `{"films": what evaluation/replay.py says of its pictures}`.
    """

    text: str
    errors: int
    by_latency: Mapping[float | None, Sequence[Mapping[str, Any]]]
    films: Mapping[str, Any]


def run_trial(trial: Trial) -> Outcome:
    """Play what is not played yet, on the cluster that this process has joined; then `record_trial`."""
    book = Book(trial.output_dir, trial.about, trial.episodes)
    pending = [episode for episode in trial.episodes if not book.is_done(episode)]
    use_gpu = trial.source.device == "cuda"
    with _Progress(len(trial.episodes), len(book.done)) as progress:

        def on_end(line: Line, actions: np.ndarray | None) -> None:
            if trial.latencies:
                line = {**line, "latency_s": trial.latencies[line["condition"]]}
            book.write(line, actions if trial.videos or trial.dataset else None)
            progress.add(bool(line["success_once"]))

        if pending:
            play(
                pending,
                trial.conditions,
                {"policy": trial.source.shared()},
                trial.makers,
                trial.options,
                seed=trial.seed,
                use_gpu=use_gpu,
                on_end=on_end,
            )
    _, lines = read_evaluation(trial.output_dir)
    if pending or not (trial.output_dir / FILMS_INDEX).is_file():
        _film(trial, lines)
    texts = [success_text(rows, latency_s) for latency_s, rows in _by_latency(lines).items()]
    return Outcome(
        text="\n".join([*texts, *describe_controller(trial.source)]),
        errors=sum(line["error"] is not None for line in lines),
        by_latency={latency_s: score_rows(rows) for latency_s, rows in _by_latency(lines).items()},
        films=read_json(trial.output_dir / FILMS_INDEX),
    )


def _by_latency(lines: Sequence[Line]) -> dict[float | None, list[Line]]:
    """Return the lines of each latency, the shortest first; of None where none was given."""
    latencies = sorted({line.get("latency_s") for line in lines}, key=lambda latency_s: latency_s or 0.0)
    return {latency_s: [line for line in lines if line.get("latency_s") == latency_s] for latency_s in latencies}


def describe_controller(source: PolicySource) -> list[str]:
    """Say how chunks were played, where that is not how all controllers play them."""
    if source.controller == "rtc":
        given = getattr(source.config, MAX_DELAY, 0)
        how = (
            f"was given the actions that are executed meanwhile, as in training (--policy.{MAX_DELAY})"
            if given
            else f"was guided to what was left of the last, as by lerobot-rollout with {flags_of_rtc(source.config)}"
        )
        return [f"Controller   rtc: each chunk {how}"]
    if relative_actions(source.config) is None:
        return []
    if source.controller == "select_action":
        return ["Controller   select_action: relative actions were added to the current state, as by lerobot-eval"]
    return [
        f"Controller   chunk: relative actions were played as by {RELATIVE_PLAYED_BY}: --eval.controller=select_action"
    ]


def flags_of_rtc(config: Any) -> str:
    """Return flags with which lerobot-rollout guides and replaces chunks as they are here."""
    options, defaults = (asdict(which) for which in (rtc_options(config), RTCConfig()))
    changed = {f"rtc.{name}": value for name, value in options.items() if value != defaults[name]}
    flags = {"queue_threshold": config.chunk_size - config.n_action_steps, **changed}
    return " ".join(f"--inference.{name}={getattr(value, 'value', value)}" for name, value in flags.items())


class _Progress:
    """How far an evaluation is, and how long it will still take: a bar on a terminal, otherwise a line now and then."""

    def __init__(self, total: int, done: int) -> None:
        self._interactive = sys.stdout.isatty()
        self._bar = tqdm(total=total, initial=done, unit="episode", file=sys.stdout, dynamic_ncols=True,
                         disable=not self._interactive)  # fmt: skip
        self._total, self._done, self._before = total, done, done
        self._successes = 0
        self._since = self._told = time.monotonic()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def add(self, success: bool) -> None:
        """One more episode is over."""
        self._done += 1
        self._successes += success
        now, played = time.monotonic(), self._done - self._before
        if self._interactive:
            self._bar.set_postfix_str(f"{self._successes} of {played} succeeded", refresh=False)
            self._bar.update()
        elif now - self._told >= TELL_EVERY_S:
            left_s = (self._total - self._done) * (now - self._since) / played
            print_safe(
                f"{self._done} of {self._total} episodes, {self._successes} of {played} succeeded, {left_s:.0f} s left"
            )
            self._told = now


def record_trial(trial: Trial) -> None:
    """Write what was played as a dataset, where that is asked for and not done.

    Raises:
        ValueError: actions were not written as it was played, or no episode repeats.
    """
    root = trial.dataset
    if root is None or is_recorded(root, trial.recorded):
        return
    _, lines = read_evaluation(trial.output_dir)
    actions = {name_of(named): executed for named, executed in read_actions(trial.output_dir)}
    played = [line for line in lines if line["error"] is None]
    if missing := sum(name_of(line) not in actions for line in played):
        raise ValueError(
            f"{address(trial.output_dir)} has not the actions of {missing} episodes, which were played without "
            "--eval.record_dataset: give another --output_dir"
        )
    eyes = Eyes(trial.env, trial.source.config)
    record_played(root, trial.makers, eyes, [(line, actions[name_of(line)]) for line in played], trial.recorded)


def _film(trial: Trial, lines: Sequence[Mapping[str, Any]]) -> None:
    """Pictures of failures, up to as many as were asked for, and of half as many successes."""
    lines_by_name = {name_of(line): line for line in to_show(lines, trial.videos)}
    recorded: dict[Any, np.ndarray] = {}
    for named, actions in read_actions(trial.output_dir):
        if name_of(named) in lines_by_name:
            recorded[name_of(named)] = actions
    chosen = [(_title(trial, line), line, recorded[name]) for name, line in lines_by_name.items() if name in recorded]
    films = make_films(trial.output_dir, trial.makers, chosen) if chosen else []
    write_json(trial.output_dir / FILMS_INDEX, {"films": films})


def _title(trial: Trial, line: Mapping[str, Any]) -> str:
    return line["task"] if len(trial.conditions) == 1 else f"{line['task']}, {line['condition']}"


def to_show(lines: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """`most` failures at most, then half as many successes; of every task one, before any has two."""
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
    """Success of all episodes, then by task, or by instruction where there is one task only: what a page shows."""
    part = "task" if len({line["task"] for line in lines}) > 1 else "instruction"
    names = list(dict.fromkeys(line[part] for line in lines if line[part] is not None))
    groups = [("all episodes", list(lines))]
    if len(names) > 1:
        groups += [(name, [line for line in lines if line[part] == name]) for name in names]
    return [{"label": label, **score(group)} for label, group in groups]


def success_text(lines: Sequence[Mapping[str, Any]], latency_s: float | None = None) -> str:
    """Return what an evaluation ends with: success overall and by task, of one task by instruction; what was not
    played. latency_s: of all lines.
    """
    played = [line for line in lines if line["error"] is None]
    every, *parts = score_rows(lines)
    at = "" if latency_s is None else f"; latency {latency_s:g} s"
    text = [f"Success      {share(every)}{at}"]
    text += [f"             {share(part)}  {escaped(part['label'])}" for part in parts]
    if at_reset := sum(line["success_at_reset"] for line in played):
        text.append(f"             {at_reset} of them at reset already")
    for line in [line for line in lines if line["error"] is not None][:5]:
        text.append(f"Not played   {escaped(line['task'])}, seed {line['seed']}: {escaped(line['error'])}")
    if len(played) < len(lines):
        text.append(
            f"             {len(lines) - len(played)} episodes ended in an error; given again, they are played again"
        )
    return "\n".join(text)


def compare_folders(a: Path, b: Path) -> tuple[str, int]:
    """Return the text of `evaluate.py --compare` for two evaluations, and how many episodes either did not play.

    Raises:
        ValueError, FileNotFoundError: not evaluations of the same list in the same environment, or not done.
    """
    (about_a, lines_a), (about_b, lines_b) = read_evaluation(a), read_evaluation(b)
    env_a, env_b = (about.get("environment") for about in (about_a, about_b))
    if env_a and env_b and not _are_alike(env_a, env_b):
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
        texts.append(comparison_text(of_a, of_b, escaped(str(a)), escaped(str(b))))
    missing = sum(line["error"] is not None for line in (*lines_a, *lines_b))
    return "\n".join(texts), missing


def _are_alike(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether two environments are configured alike, defaults that one names included; tasks are those of the
    list.
    """
    if a == b:
        return True
    # What a result names is not imported: of environments of one's own, the options decide as they are given.
    if any(env["type"] == "gym" or any(o.startswith(DISCOVER) for o in env["options"]) for env in (a, b)):
        return a["type"] == b["type"] and set(a["options"]) == set(b["options"])
    config_a, config_b = (env_config(env["type"], env["options"]) for env in (a, b))
    return a["type"] == b["type"] and vars(config_a) | {"task": None} == vars(config_b) | {"task": None}
