"""An evaluation from its flags: `evaluate.py` in the parts that it names, and the demo's own.

Runs on the driver. What is wrong with policy, environment or their fit is said before a process is started.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lerobot.envs.configs import EnvConfig
from tqdm import tqdm

from vla_finetuning.config import Config, EvalOptions, EvaluateConfig
from vla_finetuning.envs.configs import env_config, gym_call
from vla_finetuning.evaluation.closed_loop import play
from vla_finetuning.evaluation.episodes import Book, Condition, Episode, episode_list, read_evaluation
from vla_finetuning.evaluation.intervals import compare, comparison_text, share
from vla_finetuning.evaluation.player import PolicySource, check_fits
from vla_finetuning.run.plan import resolve_policy
from vla_finetuning.terminal import escaped


@dataclass(frozen=True)
class Trial:
    """A resolved evaluation.

    Attributes:
        about: what decides its results, as JSON.
    """

    output_dir: Path
    env: EnvConfig
    source: PolicySource
    episodes: list[Episode]
    options: EvalOptions
    seed: int
    about: dict[str, Any]


def resolve_trial(config: EvaluateConfig) -> Trial:
    """Find and check policy and environment.

    Raises:
        ValueError, FileNotFoundError: saying what to do.
    """
    env = env_config(config.env_type or "", config.env_options)
    gym_call(env)
    asked = Config(
        policy_revision=config.policy_revision,
        policy_options=config.policy_options,
        policy_trust_remote_code=config.policy_trust_remote_code,
    )
    policy_config, folder, base = resolve_policy(asked, config.policy_path)
    assert folder is not None  # there was a path
    check_fits(policy_config, env, config.rename_map)
    use_gpu = torch.cuda.is_available() if config.use_gpu is None else config.use_gpu
    source = PolicySource(
        folder,
        policy_config,
        env,
        rename_map=config.rename_map,
        device="cuda" if use_gpu else "cpu",
        trusted=config.policy_trust_remote_code,
    )
    about = {
        "policy": {**base, "options": config.policy_options, "rename_map": config.rename_map},
        "environment": {"type": config.env_type, "options": config.env_options},
        "seed": config.seed,
    }
    episodes = episode_list(["plain"], config.env_type or "", config.eval.n_episodes, config.seed)
    output_dir = Path(config.output_dir or "").expanduser().absolute()
    return Trial(output_dir, env, source, episodes, config.eval, config.seed, about)


def run_trial(trial: Trial) -> str:
    """Play what is not played yet, on the cluster that this process has joined, and say how it went."""
    book = Book(trial.output_dir, trial.about, trial.episodes)
    left = [episode for episode in trial.episodes if not book.is_done(episode)]
    use_gpu = trial.source.device == "cuda"
    with tqdm(total=len(trial.episodes), initial=len(book.done), unit="episode", file=sys.stdout,
              disable=not sys.stdout.isatty(), dynamic_ncols=True) as bar:  # fmt: skip

        def written(line: Mapping[str, Any]) -> None:
            book.write(line)
            bar.update()

        if left:
            sources, conditions = {"policy": trial.source}, {"plain": Condition()}
            gym = gym_call(trial.env)
            play(left, conditions, sources, gym, trial.options, seed=trial.seed, use_gpu=use_gpu, written=written)
    _, lines = read_evaluation(trial.output_dir)
    return success_text(lines)


def success_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """What an evaluation ends with: success overall and by instruction, and what could not be played."""
    played = [line for line in lines if line["error"] is None]
    told = [f"Success      {share(sum(line['success_once'] for line in played), len(played))}"]
    instructions = sorted({line["instruction"] for line in played})
    for instruction in instructions if len(instructions) > 1 else ():
        own = [line for line in played if line["instruction"] == instruction]
        told.append(
            f"             {share(sum(line['success_once'] for line in own), len(own))}  {escaped(instruction)}"
        )
    if at_reset := sum(line["success_at_reset"] for line in played):
        told.append(f"             {at_reset} of them at reset already")
    for line in [line for line in lines if line["error"] is not None][:5]:
        told.append(f"Not played   seed {line['seed']}: {escaped(line['error'])}")
    if len(played) < len(lines):
        told.append(
            f"             {len(lines) - len(played)} episodes ended in an error; given again, they are played again"
        )
    return "\n".join(told)


def compare_folders(a: Path, b: Path) -> str:
    """What `evaluate.py --compare` prints about two evaluations.

    Raises:
        ValueError, FileNotFoundError: not evaluations of the same list, or not done.
    """
    return comparison_text(
        compare(*(read_evaluation(folder)[1] for folder in (a, b))), escaped(str(a)), escaped(str(b))
    )
