"""Datasets of episodes that a policy learned from, against gymnasium's replay of the same actions."""

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import gymnasium
import numpy as np
import pytest
import ray
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from ray.exceptions import WorkerCrashedError

import grpo
from tests.buckets import forget, runs_bucket
from tests.in_process import tasks_here
from tests.rl.test_learning import resolved, train_as
from vla_finetuning.buckets import mirror
from vla_finetuning.buckets.mirror import as_path, pull, push
from vla_finetuning.envs import two_bins
from vla_finetuning.envs.configs import env_config, task_makers
from vla_finetuning.envs.contract import ContractError
from vla_finetuning.envs.two_bins import TwoBins
from vla_finetuning.envs.writing import merge_datasets
from vla_finetuning.files import read_lines
from vla_finetuning.rl import recording
from vla_finetuning.rl.recording import pending_dataset, read_episodes, record_rollouts, write_episodes
from vla_finetuning.rollouts import stage
from vla_finetuning.rollouts.experts import play_expert
from vla_finetuning.rollouts.player import Eyes
from vla_finetuning.rollouts.recording import is_free, record_dataset, record_played, replay_frames, write_share

OPTIONS = {"env.episode_length": 6, "grpo.groups": 2, "grpo.group_size": 2, "grpo.iterations": 3}
OPTIONS |= {"save_freq": 1, "eval.n_episodes": 1}


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    options = {**OPTIONS, "grpo.record_dataset": folder / "dataset", "grpo.record_every": 2}
    run = resolved(base, folder / "run", **options)
    assert train_as(run)
    return run


def log_of(run):
    return [json.loads(line) for line in read_lines(run.job.output_dir / "metrics.jsonl")]


def losses(run):
    return [line["loss"] for line in log_of(run)[1:]]


def test_episode_that_does_not_replay_is_left_out_of_dataset(run, tmp_path, capfd, monkeypatch):
    """Its environment ends in another state, or fails; without any other episode that is an error."""
    first, second, third = list(read_episodes(run))[:3]
    diverging = {**second[0], "final_state": "another"}, second[1]
    failing = third[0], np.full_like(third[1], np.nan)  # which the robot cannot follow
    eyes, makers = Eyes(run.scene.env, run.policy.config), task_makers(run.scene.env)
    waits = [False, True, True]
    monkeypatch.setattr(ray, "wait", lambda tasks, timeout: (tasks[:1], tasks[1:]) if waits.pop(0) else ([], tasks))
    monkeypatch.setattr(ray, "available_resources", dict)
    (tmp_path / "empty").mkdir()
    (tmp_path / "dataset").symlink_to(tmp_path / "empty")
    with tasks_here():
        record_played(tmp_path / "dataset", makers, eyes, [diverging, first, failing], {"seed": 3})
    assert "1 episodes, " in (out := capfd.readouterr().out) and "; 2 left out, which do not repeat" in out
    assert "0 of 1 parts of empty written; 0 CPUs of the cluster are free" in out
    dataset = LeRobotDataset("recorded/policy", root=tmp_path / "dataset", video_backend="pyav")
    assert dataset.meta.total_episodes == 1 and len(dataset) == first[0]["steps"]
    assert dataset.meta.robot_type == "tabletop_gantry"  # as record.py names it
    np.testing.assert_array_equal(dataset[0]["action"], first[1][0].astype(np.float32))
    with tasks_here(), pytest.raises(ValueError, match="no episode could be repeated.*: nothing is written"):
        record_played(tmp_path / "none", makers, eyes, [diverging, failing], {"seed": 3})
    assert not (tmp_path / "none").exists()


def test_expert_error_skips_only_its_episode(tmp_path, monkeypatch):
    config = env_config("two_bins", ["--episode_length=40"])

    def play(env, seed, error=ValueError):
        if seed == 1:
            env.step(np.zeros(3))
            raise error("no plan")
        return play_expert(config, 0, env, seed)

    makers = task_makers(config)
    share = [(next(iter(makers)), seed) for seed in range(3)]
    monkeypatch.setattr(TwoBins, "close", lambda self: 1 / 0)  # as a broken simulator may
    written, left_out = write_share(tmp_path / "dataset", makers, play, share, config)
    assert written == [True, False, True] and left_out == [f"{share[1][0]}: ValueError: no plan"]
    dataset = LeRobotDataset("recorded/two_bins", root=tmp_path / "dataset", video_backend="pyav")
    frames = [play_expert(config, 0, makers[share[0][0]](), seed) for seed in (0, 2)]
    assert [dataset.meta.episodes[i]["length"] for i in range(2)] == [len(episode) for episode in frames]
    with pytest.raises(ContractError, match="no plan"):
        write_share(tmp_path / "none", makers, partial(play, error=ContractError), share, config)


def test_frames_too_small_for_the_encoder_are_written_as_images(tmp_path):
    config, rng = env_config("two_bins"), np.random.default_rng(0)
    makers, sizes = task_makers(config), {"observation.images.low": (24, 200), "observation.images.narrow": (40, 16)}
    frames = [{key: rng.integers(0, 255, (*size, 3), np.uint8) for key, size in sizes.items()} for _ in range(4)]
    play, share = lambda env, seed: [frame | {"task": "go"} for frame in frames], [(next(iter(makers)), 0)]
    for number in range(2):
        assert write_share(tmp_path / str(number), makers, play, share, config) == ([True], [])
    merge_datasets("recorded/small", [tmp_path / "0", tmp_path / "1"], tmp_path / "dataset")
    dataset = LeRobotDataset("recorded/small", root=tmp_path / "dataset")
    assert len(dataset) == 8 and not dataset.meta.video_keys
    for row, frame in zip(dataset, frames * 2, strict=True):
        for key in sizes:
            np.testing.assert_array_equal(np.round(row[key].permute(1, 2, 0).numpy() * 255), frame[key])


def test_recording_limits_environment_time_and_reports_dead_task(tmp_path, monkeypatch):
    limits = []
    monkeypatch.setattr(stage, "_limit", lambda seconds: limits.append(seconds) or nullcontext())
    config = env_config("two_bins", ["--episode_length=40"])
    (task, make), *_ = task_makers(config).items()
    share = [(task, seed) for seed in (0, 1)]
    monkeypatch.setenv("VLA_STEP_TIMEOUT_S", "7")
    monkeypatch.setattr(ray, "wait", lambda tasks, timeout: (tasks[:1], tasks[1:]))
    play, about = partial(play_expert, config, 0), lambda _: {}
    with tasks_here():
        record_dataset(tmp_path / "dataset", {task: make}, play, share, config, about, "nothing")
    assert limits[:3] == [stage.MAKE_LIMIT_S, stage.MAKE_LIMIT_S, 7] and set(limits[3:]) == {7}
    died = mock.patch.object(ray, "get", mock.Mock(side_effect=WorkerCrashedError))
    with tasks_here(), died, pytest.raises(RuntimeError, match="a part of none cannot be .*VLA_STEP_TIMEOUT_S"):
        record_dataset(tmp_path / "none", {task: make}, play, share, config, about, "nothing")


def test_unshared_recording_path_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"does not see {tmp_path / 'parts'}.*a path that all nodes share"):
        write_share(tmp_path / "parts" / "0", {}, play_expert, [], env_config("two_bins"))


def test_mount_point_as_dataset_root_is_refused(tmp_path, monkeypatch):
    """A finished dataset replaces its folder."""
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path)
    with pytest.raises(ValueError, match="--root=.* is a mount point, which no finished dataset can replace"):
        is_free(tmp_path, "--root")
    assert is_free(tmp_path / "new", "--root")
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "new"):
        with pytest.raises(OSError, match=f"--root={path}: .* choose another"):
            is_free(path, "--root")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert not is_free(tmp_path, "--root")  # a finished dataset may be read-only


def test_every_second_iteration_is_recorded(run):
    folder = run.job.output_dir / "rollouts"
    assert [path.name for path in sorted(folder.iterdir())] == ["000000-0.jsonl", "000002-0.jsonl"]
    episodes, lines = list(read_episodes(run)), log_of(run)
    assert len(episodes) == 2 * run.episodes
    assert sum(line["steps"] for line, _ in episodes) == lines[1]["env_steps"] + lines[3]["env_steps"]
    assert all(actions.shape == (line["steps"], 3) for line, actions in episodes)
    fewer = replace(run.config, grpo=replace(run.options, record_every=3))  # as --resume may say
    assert list(read_episodes(replace(run, config=fewer)))[-1][0] == episodes[run.episodes - 1][0]


def test_recorded_dataset_equals_gymnasium_replay(run, tmp_path):
    episodes = list(read_episodes(run))
    root, share = tmp_path / "dataset", [(line["task"], (line, actions)) for line, actions in episodes]
    play = partial(replay_frames, Eyes(run.scene.env, run.policy.config))
    assert write_share(root, task_makers(run.scene.env), play, share, run.scene.env) == ([True] * len(episodes), [])
    dataset, row = LeRobotDataset("recorded/policy", root=root, video_backend="pyav"), 0
    for line, actions in episodes:
        env = gymnasium.make(two_bins.GYM_ID, max_episode_steps=6)
        observation, _ = env.reset(seed=line["seed"])
        for action in actions:
            frame = dataset[row]
            np.testing.assert_allclose(frame["observation.state"], observation["agent_pos"], atol=1e-5)
            np.testing.assert_array_equal(frame["action"], action.astype(np.float32))
            observation, _, _, _, info = env.step(action)
            assert bool(frame["next.success"]) == info["is_success"]
            row += 1
        assert env.unwrapped.state_hash() == line["final_state"]
        env.close()
    assert row == len(dataset)


def test_recording_does_not_change_training(run, base, tmp_path):
    plain = resolved(base, tmp_path / "run", **OPTIONS)
    assert train_as(plain) and losses(plain) == losses(run)
    assert not (plain.job.output_dir / "rollouts").exists() and pending_dataset(plain) is None


def test_dataset_is_written_once_and_existing_one_is_not_replaced(run, monkeypatch):
    written = []

    def record(root, makers, eyes, episodes, about):
        written.append(len(episodes))
        (root / "meta").mkdir(parents=True)
        (root / "meta" / "environment.json").write_text(json.dumps({"evaluation": about}))

    monkeypatch.setattr(recording, "record_played", record)
    with tasks_here():
        record_rollouts(run)
        record_rollouts(run)
    assert written == [2 * run.episodes] and pending_dataset(run) is None
    foreign = Path(run.options.record_dataset) / "meta" / "environment.json"
    foreign.write_text(json.dumps({"evaluation": {"seed": 0}}))
    with pytest.raises(ValueError, match="--grpo.record_dataset=.* exists and is not empty"):
        pending_dataset(run)


def test_recording_refuses_missing_iterations(base, tmp_path, monkeypatch):
    run = resolved(base, tmp_path / "run", **{**OPTIONS, "grpo.record_dataset": tmp_path / "dataset"})
    monkeypatch.setattr(grpo, "steps_done", lambda job: 1)
    grpo.plan(run)  # a demo that starts again, over an earlier run's checkpoints
    with pytest.raises(ValueError, match="lacks the episodes of 1 of 1 iterations"):
        grpo.plan(replace(run, config=replace(run.config, resume=True)))
    for iteration in (1, 2):
        write_episodes(run.job.output_dir, iteration, SimpleNamespace(rank=0), [])
    with pytest.raises(ValueError, match="lacks the episodes of 1 of 3 iterations"):
        record_rollouts(run)


def test_recording_in_bucket_equals_disk_after_restart(run, base, tmp_path, monkeypatch):
    """Stopped after two iterations, when an attempt with two processes had begun the third."""
    monkeypatch.setattr(mirror.tempfile, "tempdir", str(tmp_path))
    url = "s3://runs/learned/run"
    options = {**OPTIONS, "grpo.record_dataset": tmp_path / "dataset", "grpo.record_every": 2}
    with runs_bucket():
        assert train_as(resolved(base, url, **{**options, "grpo.iterations": 2}))
        write_episodes(as_path(url), 2, SimpleNamespace(rank=1), [({"seed": 1}, np.zeros((2, 3)))])
        push(as_path(url))
        forget()
        assert train_as(resolved(base, url, **options))
        push(as_path(url))
        forget()
        in_bucket = resolved(base, url, **options)
        pull(in_bucket.job.output_dir)
        expected, actual = (list(read_episodes(each)) for each in (run, in_bucket))
        assert [line for line, _ in actual] == [line for line, _ in expected]
        assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(actual, expected, strict=True))
        assert losses(in_bucket) == losses(run) and len(losses(run)) == 3
