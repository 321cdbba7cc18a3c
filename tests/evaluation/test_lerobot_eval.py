"""Successes of `evaluate.py` against the `lerobot-eval` program: same policy, same seeds, batches of one."""

import json
import sys

import numpy as np
import pytest
import torch
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.factory import make_pre_post_processors
from lerobot.scripts import lerobot_eval

import evaluate
from tests.evaluation import several  # noqa: F401 registers its environment
from tests.evaluation.test_evaluate import lines_of
from tests.rollouts.test_player import STATS, act_config
from vla_finetuning.envs.two_bins_scene import BINS
from vla_finetuning.policies.saving import save_pretrained


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save a deterministic ACT that moves around the left bin, depending on the scene."""
    config = act_config(chunk_size=8, n_action_steps=5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        policy = ACTPolicy(config)
    stats = {**STATS, "action": {"mean": np.array(BINS["left"]), "std": np.full(3, 3.0)}}
    folder = tmp_path_factory.mktemp("lerobot_eval") / "act"
    save_pretrained(policy, *make_pre_post_processors(config, dataset_stats=stats), folder)
    return folder


@pytest.mark.ray
@pytest.mark.parametrize(
    ("env", "tasks", "episodes"),
    [
        pytest.param("two_bins", ["two_bins"], 12, marks=pytest.mark.gate),
        pytest.param("several", ["near/0", "near/1", "far/0"], 4, marks=pytest.mark.slow),
    ],
)
def test_successes_match_lerobot_eval(ray_cluster, folder, tmp_path, monkeypatch, capsys, env, tasks, episodes):
    flags = [f"--policy.path={folder}", f"--env.type={env}", f"--eval.n_episodes={episodes}", "--seed=1000"]
    lerobot_flags = ["--policy.device=cpu", "--eval.batch_size=1", f"--output_dir={tmp_path / 'theirs'}"]
    registered = "--env.discover_packages_path=vla_finetuning.envs"
    monkeypatch.setattr(sys, "argv", ["lerobot-eval", registered, *flags, *lerobot_flags])
    (tmp_path / "theirs").mkdir()
    # Its log handlers would outlive the test.
    monkeypatch.setattr(lerobot_eval, "init_logging", lambda: None)
    lerobot_eval.main()
    lerobot_flags = json.loads((tmp_path / "theirs" / "eval_info.json").read_text())
    expected = {}
    for task_info in lerobot_flags["per_task"]:
        name = f"{task_info['task_group']}/{task_info['task_id']}" if len(tasks) > 1 else task_info["task_group"]
        rows = zip(task_info["metrics"]["successes"], task_info["metrics"]["sum_rewards"], strict=True)
        expected |= {(name, episode): row for episode, row in enumerate(rows)}
    capsys.readouterr()

    assert evaluate.main([*flags, "--eval.env_actors=1", f"--output_dir={tmp_path / 'ours'}"]) == 0
    lines = lines_of(tmp_path / "ours")
    actual = {(line["task"], line["episode"]): (line["success_once"], line["total_reward"]) for line in lines}
    assert actual == expected and list(dict.fromkeys(task for task, _ in expected)) == tasks
    successes = {task: sum(actual[task, i][0] for i in range(episodes)) for task in tasks}
    assert 0 < sum(successes.values()) < len(actual)  # there is something to tell apart
    out = capsys.readouterr().out
    assert f"Success      {sum(successes.values())} of {len(actual)}, " in out
    for task in tasks if len(tasks) > 1 else ():
        assert f"             {successes[task]} of {episodes}, " in out and f"  {task}\n" in out
