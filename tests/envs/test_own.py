"""Custom environments: discovery, features from their spaces, and the contract checked while they play."""

import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.datasets import LeRobotDataset
from lerobot.envs.factory import make_env

import record
import vla
from tests.envs.point import Point
from tests.in_process import TINY
from tests.rl.test_learning import metrics, resolved, train_as
from tests.rollouts.test_player import make_base
from vla_finetuning.envs import configs, contract
from vla_finetuning.envs.configs import env_config, initial_state_counts, longest_episode, task_makers
from vla_finetuning.envs.contract import ContractError
from vla_finetuning.envs.protocol import stack
from vla_finetuning.rl import groups
from vla_finetuning.rollouts.episodes import Episode, Playing
from vla_finetuning.rollouts.experts import play_expert
from vla_finetuning.rollouts.scheduler import Scheduler
from vla_finetuning.rollouts.stage import Stage

DOCS = Path(__file__).parents[2] / "docs" / "simulators.md"
POINT = "tests.envs.point:mine/Point-v0"
BROKEN = "tests.envs.broken_points"
FEATURES = {
    "observation.image": PolicyFeature(FeatureType.VISUAL, (3, 32, 32)),
    "observation.state": PolicyFeature(FeatureType.STATE, (3,)),
}


@pytest.fixture(autouse=True)
def _another_process(monkeypatch):
    monkeypatch.setattr(contract.Contract, "_repeats", False)


def broken_makers(name, *options):
    return task_makers(env_config("gym", [f"--task={BROKEN}:broken/{name}-v0", *options]))


def play_line(makers, seed=1000, action=0.0):
    """Play an episode of constant actions and return its line."""
    (task,) = makers
    stage = Stage(makers, 1, step_limit_s=60)
    ended, begin = {}, [Playing(0, Episode("plain", task, 0, seed))]
    while not ended:
        (ended, waiting), _ = stage.advance(begin, np.full((1, 2, 3), action) if not begin else None)
        begin = []
        assert ended or waiting
    return ended[0]


def test_documented_environment_plays_as_in_gymnasium():
    assert f"```python\n{(Path(__file__).parent / 'point.py').read_text()}```" in DOCS.read_text()
    config = env_config("gym", [f"--task={POINT}"])
    shapes = {config.features_map[key]: feature.shape for key, feature in config.features.items()}
    assert shapes == {"action": (3,), "observation.state": (3,), "observation.image": (32, 32, 3)}
    assert longest_episode(config) == 20 and longest_episode(replace(config, episode_length=7)) == 7
    line = play_line(task_makers(config), action=0.3)
    with gymnasium.make(POINT) as env:
        env.reset(seed=1000)
        steps, over = 0, False
        while not over:
            _, reward, terminated, truncated, info = env.step(np.full(3, 0.3))
            steps, over = steps + 1, terminated or truncated
    assert line["instruction"] == "go to the corner"
    assert (line["steps"], line["success_at_end"], line["info"]) == (steps, info["is_success"], info)
    ((vector,),) = (tasks.values() for tasks in make_env(config, n_envs=1).values())  # LeRobot's own
    assert vector.call("_max_episode_steps") == (20,)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Silent", r"Silent-v0 never said whether it succeeded: .* 'is_success' \(the last one has score\)"),
        ("NaN", r"NaN-v0 gave info\['is_success'\] = nan after step 1: expected True or False"),
        ("Text", r"Text-v0 gave info\['is_success'\] = 'no' after step 1"),
        ("Words", "Words-v0 gave the reward 'much' after step 1: expected a number"),
        ("Seedless", "Seedless-v0 ignores its seed: two resets with seed=1000 show different states.*np_random"),
        ("Wide", r"shows 'agent_pos' as float32 \(7,\) at its reset: expected numbers \(3,\)"),
        ("Float", r"shows 'pixels' as float32 \(32, 32, 3\) at its reset: expected uint8"),
        ("Small", r"shows 'pixels' as uint8 \(16, 16, 3\) at its reset: expected uint8 .*\(32, 32, 3\)"),
    ],
)
def test_contract_violation_raises(name, message):
    with pytest.raises(ContractError, match=message):
        play_line(broken_makers(name))


@pytest.mark.parametrize(
    ("name", "message"), [("Lost", r"'agent_pos' is not finite at its reset: \[nan nan nan\]"), ("NaNReward", "nan")]
)
def test_non_finite_values_fail_the_episode_alone(name, message):
    assert re.search(message, play_line(broken_makers(name))["error"])


def test_environment_without_step_limit_is_refused():
    message = "has no step limit, so that an episode may never end: register it with max_episode_steps=N"
    with pytest.raises(ValueError, match=message):
        broken_makers("Endless")
    assert play_line(broken_makers("Endless", "--episode_length=3"))["error"] is None
    with pytest.raises(ContractError, match=message):
        play_line(task_makers(env_config("unlimited_point", [f"--discover_packages_path={BROKEN}"])))
    for name, success in (("Named-v0", False), ("NamedByNumpy-v0", False), ("Unbounded-v0", True)):
        options = [f"--task={name}", f"--discover_packages_path={BROKEN}"]
        line = play_line(task_makers(env_config("unlimited_point", options)), action=1.0)
        assert line["error"] is None and line["success_at_end"] is success and (line["steps"] == 4) is not success


def test_infinite_info_value_is_written_as_json():
    assert play_line(broken_makers("Measured"))["info"] == {"is_success": False, "distance": "inf"}


def test_texts_in_observations_and_absent_instructions_are_left_out():
    makers = broken_makers("Measured")
    assert play_line(makers)["instruction"] == ""
    assert stack([makers["gym"]().reset(seed=0)[0]]).keys() == {"pixels", "agent_pos"}


def test_invalid_package_or_task_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--env.discover_packages_path=nowhere_at_all: cannot be imported on .*PYTHON"):
        env_config("two_bins", ["--discover_packages_path=nowhere_at_all"])
    with pytest.raises(ValueError, match="--env.discover_packages_path PACKAGE registers others"):
        env_config("nowhere")
    for options, message in (
        ([], "which environment"),
        (["--task=mine/Point-v9"], "Point"),
        (["--task=CartPole-v1"], "'action' is Discrete.*expected a Box"),
    ):
        with pytest.raises(ValueError, match=message):
            env_config("gym", options)


@pytest.mark.gate
def test_installed_lerobot_plugins_are_discovered(tmp_path):
    for name, source in {
        "lerobot_env_mine": "from lerobot.envs.configs import EnvConfig\nfrom tests.envs.broken_points import "
        "UnlimitedPoint\n@EnvConfig.register_subclass('mine')\nclass Mine(UnlimitedPoint):\n    pass\n",
        "lerobot_policy_mine": "from lerobot.configs import PreTrainedConfig\nfrom lerobot.policies.act."
        "configuration_act import ACTConfig\n@PreTrainedConfig.register_subclass('my_act')\nclass MyACTConfig("
        "ACTConfig):\n    pass\n",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(source)
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
        (tmp_path / f"{name}-1.0.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
    (tmp_path / "config.json").write_text('{"type": "my_act", "chunk_size": 5, "n_action_steps": 5}')
    check = (
        "import sys\nfrom pathlib import Path\nfrom vla_finetuning.envs.configs import env_config\n"
        "from vla_finetuning.policies.loading import load_policy_config\nfrom vla_finetuning.policies.registry import "
        "family_of, require_trained\nprint(type(env_config('mine')).__name__)\nrequire_trained('my_act', 'it')\n"
        "config = load_policy_config(Path(sys.argv[1]))\nprint(config.type, family_of(config).type)"
    )
    run = subprocess.run(
        [sys.executable, "-c", check, tmp_path], capture_output=True, text=True,
        env={"PYTHONPATH": f"{tmp_path}:{DOCS.parents[1]}", "HF_HUB_OFFLINE": "1"}, check=False,
    )  # fmt: skip
    assert run.stdout.split() == ["Mine", "my_act", "my_act"], run.stderr


PACKAGE_FLAGS = [f"--env.discover_packages_path={BROKEN}", "--env.type=unlimited_point"]


@pytest.mark.ray
@pytest.mark.gate
def test_contract_violation_raises_on_a_cluster(ray_cluster):
    scheduler = Scheduler(broken_makers("Silent"), stages=1, slots=1, cpus=0.5, step_limit_s=60)
    try:
        with pytest.raises(ContractError, match="never said whether it succeeded"):
            scheduler.play_here({0: Episode("plain", "gym", 0, 1000)}, lambda *_: np.zeros((1, 5, 3)))
    finally:
        scheduler.close()


@pytest.fixture(scope="module")
def tiny_base(tmp_path_factory):
    """Make a tiny PI0.5 with the features of `Point`."""
    return make_base(tmp_path_factory.mktemp("own") / "base", ["go to the corner"], FEATURES, **TINY)


@pytest.mark.ray
def test_record_and_vla_use_environment_of_discovered_package(ray_cluster, tiny_base, tmp_path, capsys):
    root, out = tmp_path / "recorded", tmp_path / "run"
    env_flags = [*PACKAGE_FLAGS, "--env.task=Listed-v0"]
    assert record.main([*env_flags, "--episodes=3", f"--root={root}", "--seed=100"]) == 0
    dataset = LeRobotDataset("local/recorded", root)
    assert dataset.num_episodes == 3 and dataset.num_frames == 15 and dataset[0]["task"] == ""
    states = [dataset[frame]["observation.state"][0].item() for frame in (0, 5, 10)]
    assert states == pytest.approx([0.0, 0.1, 0.2])

    flags = [f"--dataset.root={root}", f"--policy.path={tiny_base}", f"--output_dir={out}", "--train.mode=full"]
    flags += ["--steps=2", "--batch_size=2", "--save_freq=2", "--env_eval_freq=2", "--eval.n_episodes=3"]
    assert vla.main([*flags, "--scaling.use_gpu=false", *env_flags, "--dry_run"]) == 0
    assert "checkpoints play 3 episodes of each task" in capsys.readouterr().out


def test_grpo_trains_in_custom_environment(tiny_base, tmp_path, monkeypatch):
    step, actions = Point.step, []

    def recording_step(self, action):
        actions.append(action)
        return step(self, action)

    monkeypatch.setattr(Point, "step", recording_step)
    env = {"env.type": "gym", "env.task": POINT, "env.episode_length": None}
    run = resolved(tiny_base, tmp_path / "run", **env, **{"grpo.iterations": 1})
    assert train_as(run)
    first, last = metrics(run)
    assert first["held_out_episodes"] == 4 and last["episodes"] == 12 and last["updates"] > 0
    assert len(actions) >= 12 and np.shape(actions) == (len(actions), 3)


def test_grpo_workers_receive_environment_packages_of_driver(tiny_base, tmp_path, monkeypatch):
    env = {"env.discover_packages_path": BROKEN, "env.type": "unlimited_point", "env.task": "Listed-v0"}
    run = resolved(tiny_base, tmp_path / "run", **env, **{"env.episode_length": None, "grpo.reserved_states": 1})
    monkeypatch.setattr(configs, "_discovered", {})
    monkeypatch.setattr(groups, "Scheduler", lambda makers, **_: makers)
    (maker,) = groups.make_rollouts(pickle.loads(pickle.dumps(run))).values()
    assert maker.keywords["packages"] == (BROKEN,)


def test_recording_starts_from_listed_initial_states():
    with pytest.raises(ValueError, match="render_fps=12.5, which is not whole: give --env.fps"):
        env_config("gym", [f"--task={BROKEN}:broken/Listed-v0"])
    config = env_config("gym", [f"--task={BROKEN}:broken/Listed-v0", "--fps=12"])
    assert initial_state_counts(config) == {"gym": 5}
    (make,) = task_makers(config).values()
    first = [play_expert(config, 100, make(), seed)[0]["observation.state"][0] for seed in (100, 101, 102)]
    assert first == pytest.approx([0.0, 0.1, 0.2])


def test_only_the_module_that_registers_the_environment_is_imported(tmp_path, monkeypatch):
    package = tmp_path / "lab_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("from . import points\n")
    (package / "points.py").write_text(
        (Path(__file__).parent / "point.py").read_text().replace("mine/", "lab_of_mine/")
    )
    (package / "other.py").write_text("import nothing_of_that_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    (make,) = task_makers(env_config("gym", ["--task=lab_of_mine:lab_of_mine/Point-v0"])).values()
    assert make().reset(seed=0)[0]["agent_pos"].shape == (3,)


def test_unpickled_maker_names_missing_package():
    (make,) = task_makers(env_config("gym", [f"--task={POINT}"])).values()
    make = pickle.loads(pickle.dumps(make))
    make.keywords["packages"] = ("nowhere_at_all",)
    with pytest.raises(ValueError, match="nowhere_at_all: cannot be imported on .* every node that simulates"):
        make()
