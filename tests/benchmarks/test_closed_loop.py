"""What is timed are the same episodes, whoever plays them."""

import numpy as np
import torch
from lerobot.policies.act.configuration_act import ACTConfig

from benchmarks.closed_loop import SEED, alone, by_lerobot, make_policy
from vla_finetuning.envs.configs import env_config, task_makers
from vla_finetuning.evaluation.player import PolicySource


def test_lerobot_and_the_bare_loop_play_the_same_episodes(tmp_path):
    env, threads = env_config("two_bins", ["--episode_length=12"]), torch.get_num_threads()
    make_policy(env, tmp_path / "policy")
    source = PolicySource(tmp_path / "policy", ACTConfig.from_pretrained(tmp_path / "policy"), env)
    try:
        seconds, expected = by_lerobot(env, source, 12, 2)
        bare_seconds, found = alone(task_makers(env), source, 2, 3)
    finally:
        torch.set_num_threads(threads)
    assert expected.keys() == {SEED, SEED + 1} and len(found) == 3 and seconds > 0 and bare_seconds > 0
    np.testing.assert_allclose([found[seed] for seed in expected], list(expected.values()))
