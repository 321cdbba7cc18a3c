"""A rehearsal on a real robot's episodes: what a user does before renting GPUs, from a look to the exported policy."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors

import vla
from diagnostics import show_dataset
from tests.datasets import make_dataset
from tests.in_process import train
from tests.plan.test_names import DROID, rename_files, split_state
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.options.schedule import REHEARSAL_STEPS
from vla_finetuning.plan.datasets import find_datasets
from vla_finetuning.plan.describe import describe
from vla_finetuning.plan.resolve import _policy_path, resolve
from vla_finetuning.policies.loading import load_policy_config

REAL = Path(__file__).resolve().parents[2] / "shared/real/g1_inspire_v21"


@pytest.mark.parametrize(
    ("argv", "frames", "steps"),
    [
        (["--dataset.root=x"], 1_461, 300),
        (["--dataset.root=x"], 31_000, 969),
        (["--dataset.repo_id=x/y"], 10**6, 1_000),
        (["--dataset.root=x", "--steps=300"], 31_000, 300),
        (["--dataset.root=x", "--num_epochs=1"], 6_400, 100),
        ([], 31_000, 900),
    ],
)
def test_demo_steps_follow_the_dataset_size(argv, frames, steps):
    config = parse_args(["--preset", "demo", *argv])
    assert (config.resolve_steps(frames), config.steps or steps) == (steps, steps)


TOP, WRIST = "observation.images.top", "observation.images.wrist"
# What a user's dataset calls LeRobot's features.
OWN = {"observation.state": "state", "action": "actions", TOP: "image"}
PROPOSED = {"actions": "action", "state": "observation.state", "image": "observation.images.base_0_rgb"}
TASKS = ("go to the red bin", "go to the blue bin", "sort all of the many coloured things by their weight and shape")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("vla_finetuning.plan.demo.DEMO_CACHE", tmp_path / "cache")


def dataset_of(folder, names=OWN, **options):
    options = {"cameras": {TOP: (48, 64)}, "tasks": TASKS[:2], **options}
    return rename_files(make_dataset(folder, **options), names)


def rehearse(folder, *flags):
    return resolve(parse_args(["--preset=demo", "--batch_size=1", f"--output_dir={folder / 'run'}", *flags]), 0)


def inputs_of(run):
    return {key: feature.shape for key, feature in run.policy.config.input_features.items()}


def words_of(run):
    return set(run.policy.config.vocabulary)


def proposed_by(refusal):
    """The flags that an error proposes, as a shell splits them."""
    return shlex.split(re.search(r"(--rename_map .*) gives them LeRobot's names", refusal)[1])


def test_demo_trains_with_the_rename_map_its_error_proposes(cache, tmp_path):
    root = dataset_of(tmp_path / "own")
    with pytest.raises(ValueError, match="no feature is called action or observation") as refused:
        rehearse(tmp_path, f"--dataset.root={root}")
    flags = proposed_by(str(refused.value))
    assert json.loads(flags[1]) == PROPOSED
    flags += ["--steps=2", "--log_freq=1", "--dataset.statistics=stored", "--scaling.num_workers=1"]
    run = rehearse(tmp_path, f"--dataset.root={root}", *flags)
    assert inputs_of(run) == {"observation.images.base_0_rgb": (3, 48, 64), "observation.state": (4,)}
    assert run.robots[0].rename_map == {} and {"red", "blue"} <= words_of(run)
    assert "observation.images.base_0_rgb  48x64x3  ->  observation.images.base_0_rgb" in describe(run)
    train(run)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and np.isfinite([line["loss"] for line in lines]).all()


def test_demo_joins_state_features_and_renames_cameras(cache, tmp_path):
    """Cameras of LeRobot's names, too, get the policy's; no map back is asked for."""
    root = split_state(dataset_of(tmp_path / "own", {"action": "actions"}), DROID)
    names = json.dumps({"actions": "action", TOP: "observation.images.base_0_rgb"})
    flags = [f"--rename_map={names}", "--dataset.state_features=joint_position,gripper_position"]
    run = rehearse(tmp_path, f"--dataset.root={root}", *flags)
    assert inputs_of(run) == {"observation.images.base_0_rgb": (3, 48, 64), "observation.state": (4,)}
    assert run.robots[0].rename_map == {TOP: "observation.images.base_0_rgb"}
    assert set(run.rows.camera_keys) < set(inputs_of(run))


def test_demo_policy_has_selected_cameras_and_instructions_only(cache, tmp_path):
    root = dataset_of(tmp_path / "own", {}, cameras={TOP: (48, 64), WRIST: (32, 32)}, tasks=TASKS)
    everything = rehearse(tmp_path, f"--dataset.root={root}")
    assert set(inputs_of(everything)) == {TOP, WRIST, "observation.state"} and "weight" in words_of(everything)
    one = rehearse(tmp_path, f"--dataset.root={root}", f"--dataset.camera_keys={TOP}")
    assert set(inputs_of(one)) == {TOP, "observation.state"}
    longest = everything.policy.config.tokenizer_max_length
    for chosen in ("--dataset.tasks=*bin", "--dataset.episodes=0,1,3,4", "--dataset.exclude_episodes=2,5"):
        run = rehearse(tmp_path, f"--dataset.root={root}", chosen)
        assert "weight" not in words_of(run) and {"red", "blue"} <= words_of(run)
        assert run.policy.config.tokenizer_max_length < longest
    (tmp_path / "weights.json").write_text('{"2": 0, "5": 0}')
    weighted = rehearse(tmp_path, f"--dataset.root={root}", f"--dataset.episode_weights=@{tmp_path}/weights.json")
    assert "weight" not in words_of(weighted)


def test_demo_on_several_datasets_uses_the_runs_names(cache, tmp_path):
    """The second has other names, another instruction, and a camera that the first lacks."""
    first = dataset_of(tmp_path / "first", {}, tasks=TASKS[:1], cameras={TOP: (48, 64)})
    names = {TOP: "image", "action": "actions"}
    second = dataset_of(tmp_path / "second", names, tasks=TASKS[1:2], cameras={TOP: (48, 64), WRIST: (32, 32)})
    rename = json.dumps({"image": TOP, "actions": "action"})
    run = rehearse(tmp_path, f"--dataset.root={first},{second}", f"--rename_map={rename}")
    assert set(inputs_of(run)) == {TOP, "observation.state"} and {"red", "blue"} <= words_of(run)
    cameras = {"robot": "arm", "camera_keys": [TOP], "rename_map": {"image": TOP, "actions": "action"}}
    gantry = {"robot": "gantry", "tasks": ["*red*"]}
    mixture = json.dumps({str(first): gantry, str(second): {**cameras, "action": ["motor_1", "motor_2", "motor_0"]}})
    run = rehearse(tmp_path, f"--dataset.mixture={mixture}", "--scaling.num_workers=2")
    assert set(inputs_of(run)) == {TOP, "observation.state"} and {"red", "blue"} <= words_of(run)


def test_demo_vocabulary_includes_advantage_labels(cache, tmp_path):
    root = dataset_of(tmp_path / "own", {})
    plain = policy_path_of(tmp_path, root)
    labelled = policy_path_of(tmp_path, root, "--recap.labels=labels.parquet")
    words = set(load_policy_config(labelled).vocabulary) - set(load_policy_config(plain).vocabulary)
    assert words == {"advantage", "positive", "negative"}


def policy_path_of(folder, root, *flags):
    """The tiny policy's folder, without what reads the labels."""
    config = parse_args(["--preset=demo", f"--output_dir={folder / 'run'}", f"--dataset.root={root}", *flags])
    return Path(_policy_path(*find_datasets(config)))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not REAL.exists(), reason="shared/real is not there")
def test_demo_on_a_real_robots_episodes(tmp_path, capsys, no_ray_cluster):
    """A Unitree G1's, v2.1, 26 joints: better than the mean action on the held-out episode, and loaded by LeRobot."""
    assert show_dataset.main([str(REAL), "--output", str(tmp_path / "dataset.html")]) == 0
    folder = tmp_path / "run"
    assert vla.main(["--preset=demo", f"--dataset.root={REAL}", f"--output_dir={folder}"]) == 0
    assert f"Steps        {REHEARSAL_STEPS[0]} (" in capsys.readouterr().out
    errors = json.loads((folder / "evaluation.json").read_text())
    assert errors["trained"]["policy"]["mse"] < 0.9 * errors["trained"]["mean_action"]["mse"]

    exported = folder / "pretrained_model"
    config = PreTrainedConfig.from_pretrained(exported)
    policy = get_policy_class(config.type).from_pretrained(exported)
    pre, post = make_pre_post_processors(config, str(exported))
    feature = load_metadata(REAL).features["action"]
    batch = {
        "observation.state": torch.zeros(26),
        "observation.images.cam_high": torch.zeros(3, 480, 640),
        "task": "Pick up the yellow bottle on the table.",
    }
    actions = post(policy.predict_action_chunk(pre(batch))).numpy()
    assert actions.shape[-1] == feature.shape[0] and np.isfinite(actions).all()
