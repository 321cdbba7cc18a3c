"""What a policy did as a dataset, against an environment of gymnasium's that plays the same actions."""

import json
import shutil

import gymnasium
import numpy as np
import pytest
from lerobot.datasets.lerobot_dataset import LeRobotDataset

import evaluate
from tests.tiny import make_base
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.envs import two_bins
from vla_finetuning.evaluation.episodes import read_actions, read_evaluation
from vla_finetuning.files import read_json
from vla_finetuning.plan.demo import make_demo_dataset

EPISODES = 3


@pytest.fixture(scope="module")
def setting(tmp_path_factory, ray_cluster):
    folder = tmp_path_factory.mktemp("recording")
    base = make_base(folder / "base", load_metadata(make_demo_dataset(folder / "dataset", pairs=2)))
    assert evaluate.main(flags(folder, base)) == 0
    return folder, base


def flags(folder, base, **changes):
    options = {
        "policy.path": base,
        "env.type": "two_bins",
        "env.episode_length": 12,
        "eval.n_episodes": EPISODES,
        "eval.videos": 0,
        "eval.record_dataset": folder / "recorded",
        "output_dir": folder / "evaluation",
        "use_gpu": "false",
        **changes,
    }
    return [f"--{name}={value}" for name, value in options.items()]


def test_the_dataset_is_what_gymnasium_shows_for_the_same_actions(setting):
    folder, _ = setting
    dataset = LeRobotDataset("recorded/policy", root=folder / "recorded", video_backend="pyav")
    _, lines = read_evaluation(folder / "evaluation")
    actions = {named["seed"]: executed for named, executed in read_actions(folder / "evaluation")}
    assert dataset.meta.total_episodes == EPISODES
    assert dataset.meta.features["action"]["names"] == ["x_cm", "y_cm", "z_cm"]
    row = 0
    for line in lines:
        env = gymnasium.make(two_bins.GYM_ID, max_episode_steps=12)
        seen, _ = env.reset(seed=line["seed"])
        for action in actions[line["seed"]]:
            frame = dataset[row]
            assert frame["task"] == env.unwrapped.task_description
            np.testing.assert_allclose(frame["observation.state"], seen["agent_pos"], atol=1e-5)
            np.testing.assert_array_equal(frame["action"], action.astype(np.float32))
            for camera, image in seen["pixels"].items():
                shown = (frame[f"observation.images.{camera}"].permute(1, 2, 0) * 255).numpy()
                assert np.abs(shown - image).mean() < 8  # as videos are
            seen, reward, terminated, truncated, info = env.step(action)
            assert float(frame["next.reward"]) == reward
            assert bool(frame["next.success"]) == info["is_success"]
            assert bool(frame["next.done"]) == (terminated or truncated)
            row += 1
        env.close()
    assert row == len(dataset)


def test_given_again_it_is_done_and_another_evaluation_does_not_replace_it(setting, capsys):
    folder, base = setting
    before = (folder / "recorded" / "meta" / "info.json").stat().st_mtime_ns
    assert evaluate.main(flags(folder, base)) == 0
    assert (folder / "recorded" / "meta" / "info.json").stat().st_mtime_ns == before
    capsys.readouterr()
    assert evaluate.main(flags(folder, base, seed=5, output_dir=folder / "other")) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    about = read_json(folder / "recorded" / "meta" / "environment.json")["evaluation"]
    assert about["environment"]["type"] == "two_bins" and json.dumps(about)


def test_episodes_whose_actions_were_not_written_cannot_be_recorded(setting, capsys):
    folder, base = setting
    shutil.copytree(folder / "evaluation", folder / "plain", ignore=shutil.ignore_patterns("actions*"))
    options = {"output_dir": folder / "plain", "eval.record_dataset": folder / "late"}
    assert evaluate.main(flags(folder, base, **options)) == 1
    assert "has not the actions of 3 episodes" in capsys.readouterr().err
