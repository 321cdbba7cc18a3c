"""Exported configs, processors and robot.json against the dataset, and exports played by plain LeRobot."""

import copy
import json
from dataclasses import replace

import pytest
import torch
import yaml
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.policies.rtc.configuration_rtc import RTCConfig

from tests import in_process
from tests.datasets import make_dataset
from tests.tiny import act_config, make_base
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.plan.describe import describe
from vla_finetuning.plan.resolve import resolve
from vla_finetuning.plan.robot_facts import learned_files
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.saving import save_pretrained
from vla_finetuning.training.checkpoint_writer import CheckpointWriter
from vla_finetuning.training.export import export, exported_checkpoint, policy_at

TOP, WRIST = "observation.images.top", "observation.images.wrist"
# Fields of a policy for another robot, from which runs start.
STALE = {
    "train_expert_only": True,
    "freeze_vision_encoder": True,
    "compile_model": True,
    "gradient_checkpointing": True,
    "repo_id": "somebody/else",
    "tags": ["their_robot"],
    "private": True,
    "push_to_hub": False,
    "pretrained_path": "their/base",
    "pretrained_revision": "their_branch",
    "use_relative_actions": True,
    "license": "gemma",
    "tokenizer_max_length": 120,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Create datasets of 26 joints and of 4, and a tiny policy for 3 joints with cameras of another size."""
    folder = tmp_path_factory.mktemp("export")
    small = {TOP: (32, 32), WRIST: (32, 32)}
    theirs = make_dataset(folder / "theirs", episodes=(6,), cameras=small, state_dim=3, action_dim=3)
    make_dataset(folder / "humanoid", episodes=(6, 5, 4), state_dim=26, action_dim=26)
    make_dataset(folder / "arm", episodes=(6, 5, 4), cameras={TOP: (60, 80)}, state_dim=4, action_dim=4)
    base = make_base(folder / "base", load_metadata(theirs), chunk_size=4, **in_process.TINY)
    edit(base / "config.json", lambda config: config | STALE)

    def relative(pipeline):
        for step in pipeline["steps"]:
            config = step["config"]
            config |= {"enabled": True} if "enabled" in config else {}
            config |= {"max_length": STALE["tokenizer_max_length"]} if "max_length" in config else {}
        return pipeline

    for name in ("pre", "post"):
        edit(base / f"policy_{name}processor.json", relative)
    return folder


def edit(path, change):
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def facts_of(where):
    return json.loads((where / "robot.json").read_text())


def trained(folder, *flags, mode="full"):
    options = [f"--policy.path={folder / 'base'}", f"--train.mode={mode}", "--scaling.use_gpu=false", "--batch_size=2"]
    options += ["--policy.use_relative_actions=false", "--dataset.missing_cameras=mask", "--steps=1"]
    return resolve(parse_args([*options, *flags]), gpus_found=0)


def exported(run):
    in_process.train(run, worker=in_process.alone(run), make_checkpoints=CheckpointWriter)
    export(run.policy, exported_checkpoint(run.job, best=False), run.job.output_dir)
    return run.job.output_dir / "pretrained_model"


def features_of(root):
    """Return a dataset's features as policies have them, with images channel-first."""
    features = json.loads((root / "meta" / "info.json").read_text())["features"]
    kinds = {"observation.state": "STATE", "action": "ACTION", TOP: "VISUAL", WRIST: "VISUAL"}
    shapes = {key: features[key]["shape"] for key in kinds if key in features}
    shapes |= {key: [3, *shape[:2]] for key, shape in shapes.items() if kinds[key] == "VISUAL"}
    return {key: {"type": kinds[key], "shape": shape} for key, shape in shapes.items()}


def random_observation(features):
    observation = {key: torch.rand(1, *feature["shape"]) for key, feature in features.items() if key != "action"}
    return {**observation, "task": ["go to the red bin"]}


def steps_of(where, name):
    steps = json.loads((where / f"policy_{name}processor.json").read_text())["steps"]
    return {step["registry_name"]: step["config"] for step in steps}


def check_export(where, root):
    """Compare an export with its dataset, and select an action with plain LeRobot."""
    config, features = json.loads((where / "config.json").read_text()), features_of(root)
    assert {**config["input_features"], **config["output_features"]} == features
    dims = features["action"]["shape"][0]
    assert config["action_feature_names"] == [f"motor_{number}" for number in range(dims)]
    before, after = steps_of(where, "pre"), steps_of(where, "post")
    assert before["normalizer_processor"]["features"] == features
    assert after["unnormalizer_processor"]["features"] == {"action": features["action"]}
    assert before["normalizer_processor"]["norm_map"] == config["normalization_mapping"]
    facts, meta = facts_of(where), LeRobotDatasetMetadata("local/x", root=root)
    assert facts["fps"] == meta.fps and facts["action_kind"] == "absolute"
    for key in ("action", "observation.state"):
        assert facts[key] == list(meta.features[key]["names"])
    sizes = {key: tuple(meta.features[key]["shape"][:2]) for key in meta.camera_keys if key in features}
    assert {name: (camera["height"], camera["width"]) for name, camera in facts["cameras"].items()} == sizes
    assert facts["instructions"] == sorted(meta.tasks.index)
    assert (facts["chunk_size"], facts["n_action_steps"]) == (config["chunk_size"], config["n_action_steps"])
    assert not before["relative_actions_processor"]["enabled"] and not after["absolute_actions_processor"]["enabled"]

    policy = get_policy_class(config["type"]).from_pretrained(where)
    pre, post = make_pre_post_processors(policy.config, pretrained_path=str(where))
    with torch.no_grad():
        action = post(policy.select_action(pre(random_observation(features))))
    assert action.shape == (1, dims)
    return config


def test_export_describes_trained_dataset_and_run(folder, tmp_path):
    run = trained(folder, f"--dataset.root={folder / 'humanoid'}", f"--output_dir={tmp_path / 'run'}")
    where = exported(run)
    config = check_export(where, folder / "humanoid")
    empty = ("repo_id", "tags", "private", "pretrained_path", "pretrained_revision", "device")
    off = ("train_expert_only", "freeze_vision_encoder", "compile_model", "gradient_checkpointing", "use_peft")
    reset = {**dict.fromkeys(empty), **dict.fromkeys(off, False), "push_to_hub": True, "use_relative_actions": False}
    assert {name: config[name] for name in reset} == reset
    assert config["license"] == STALE["license"]  # derived weights have the same license
    base = json.loads((folder / "base" / "config.json").read_text())
    changed = {*reset, "input_features", "output_features", "action_feature_names"}
    assert {name for name in base if base[name] != config[name]} <= changed and base.keys() == config.keys()

    next_run = trained(folder, f"--dataset.root={folder / 'humanoid'}", f"--policy.path={where}", "--output_dir=x")
    assert next_run.policy.config.input_features == run.policy.config.input_features
    assert next_run.policy.start().config.output_features["action"].shape == (26,)


def test_training_with_action_prefixes_is_exported_and_works_with_rtc(folder, tmp_path):
    data = f"--dataset.root={folder / 'humanoid'}"
    run = trained(folder, data, "--policy.rtc_training_max_delay=2", f"--output_dir={tmp_path / 'run'}")
    assert "the first 0 to 2 actions of a chunk are given" in describe(run)
    where = exported(run)
    check_export(where, folder / "humanoid")
    assert facts_of(where)["rtc_training_max_delay"] == 2
    edit(where / "robot.json", lambda facts: facts | {"instructions_end_with": ", Advantage: positive"})
    next_run = trained(folder, data, f"--policy.path={where}", "--output_dir=x")
    assert next_run.policy.config.rtc_training_max_delay == 2
    # As GRPO exports it.
    own_names, config = {TOP: "observation.images.front"}, copy.deepcopy(next_run.policy.config)
    config.n_action_steps = 2
    files = learned_files(where, config, own_names, {})
    other = copy.deepcopy(config)
    other.rtc_training_max_delay = 0
    other.chunk_size -= 1
    facts = learned_files(where, other, own_names, {})["robot.json"]
    assert "rtc_training_max_delay" not in facts and facts["chunk_size"] == config.chunk_size - 1
    robot = replace(next_run.robots[0], config=config, own_names=own_names, files=files)
    export(next_run.policy.select_robot(robot), exported_checkpoint(run.job, best=False), tmp_path / "grpo")
    facts = facts_of(tmp_path / "grpo" / "pretrained_model")
    assert facts["rtc_training_max_delay"] == 2
    assert (facts["n_action_steps"], facts["instructions_end_with"]) == (2, "")
    config = json.loads((tmp_path / "grpo" / "pretrained_model" / "config.json").read_text())
    assert config["n_action_steps"] == 2
    cameras = {name for name, feature in config["input_features"].items() if feature["type"] == "VISUAL"}
    assert facts["cameras"].keys() == cameras == {"observation.images.front", WRIST}
    off = trained(folder, data, f"--policy.path={where}", "--policy.rtc_training_max_delay=0", "--output_dir=x")
    assert "rtc_training_max_delay" not in off.robots[0].files["robot.json"] and "are given" not in describe(off)

    # LeRobot's real-time chunking guides it like any policy.
    policy = get_policy_class("tiny_pi05").from_pretrained(where)
    policy.config.rtc_config = RTCConfig(execution_horizon=3)
    policy.init_rtc_processor()
    pre, _ = make_pre_post_processors(policy.config, pretrained_path=str(where))
    batch = pre(random_observation(features_of(folder / "humanoid")))
    noise = torch.randn(1, 4, policy.config.max_action_dim)
    plain, guided = (
        policy.predict_action_chunk(batch, noise=noise, inference_delay=1, prev_chunk_left_over=left)
        for left in (None, torch.full((1, 3, 26), 0.5))
    )
    assert (guided - 0.5)[:, 0].abs().max() < 0.5 * (plain - 0.5)[:, 0].abs().max()


def test_freeze_options_are_exported_from_train_mode(folder):
    for mode, part in {"full": False, "expert": True}.items():
        run = trained(folder, f"--dataset.root={folder / 'humanoid'}", "--output_dir=x", mode=mode)
        config = run.policy.exported_config()
        assert (config.train_expert_only, config.freeze_vision_encoder) == (part, part), mode
    run.policy.config.use_amp = True
    assert run.policy.exported_config().use_amp
    in_float32 = replace(run.policy, train=replace(run.policy.train, precision="fp32"))
    assert not in_float32.exported_config().use_amp
    assert {"train_expert_only", "freeze_vision_encoder"} <= family_of(config).ignored_options.keys()


def test_each_robot_of_a_mixture_has_its_own_export(folder, tmp_path):
    mixture = {"members": [{"root": str(folder / name), "robot": name} for name in ("humanoid", "arm")]}
    (tmp_path / "mix.yaml").write_text(yaml.safe_dump(mixture))
    run = trained(folder, f"--dataset.mixture=@{tmp_path / 'mix.yaml'}", f"--output_dir={tmp_path / 'run'}")
    assert {key: feature.shape for key, feature in run.policy.config.input_features.items()} == {
        TOP: (3, 60, 80),
        WRIST: (3, 96, 80),
        "observation.state": (26,),
    }
    where = exported(run)
    for name in ("humanoid", "arm"):
        check_export(where / name, folder / name)


def test_unnamed_actions_do_not_get_names_of_base(folder, tmp_path):
    root = make_dataset(tmp_path / "unnamed", episodes=(6,), state_dim=5, action_dim=5)
    edit(root / "meta" / "info.json", lambda info: (info["features"]["action"].update(names=None), info)[1])
    run = trained(folder, f"--dataset.root={root}", "--output_dir=x")
    assert run.policy.config.action_feature_names is None


def test_unpadded_policy_for_another_width_is_refused(folder, tmp_path):
    features = {
        key: PolicyFeature(FeatureType[feature["type"]], tuple(feature["shape"]))
        for key, feature in features_of(folder / "theirs").items()
        if key != "action"
    }
    config = act_config(features, chunk_size=4, n_action_steps=4)
    stats = {key: {name: torch.ones(3) for name in ("mean", "std")} for key in ("observation.state", "action")}
    stats |= {key: {name: torch.ones(3, 1, 1) for name in ("mean", "std")} for key in (TOP, WRIST)}
    save_pretrained(ACTPolicy(config), *make_pre_post_processors(config, dataset_stats=stats), tmp_path / "act")
    flags = [f"--policy.path={tmp_path / 'act'}", "--steps=1", "--scaling.use_gpu=false", "--train.mode=full"]
    with pytest.raises(ValueError, match=r"of another shape: .*\(found \(\d+, 3\), expected \(\d+, 26\)\)"):
        resolve(parse_args([*flags, f"--dataset.root={folder / 'humanoid'}", "--output_dir=x"]), gpus_found=0)


BASES = [f"observation.images.{name}_0_rgb" for name in ("base", "left_wrist", "right_wrist")]


@pytest.fixture(scope="module")
def renamed(folder):
    """Return flags of a run from a base with pi05_base's camera names, one of which it masks."""
    dims, cameras = {"state_dim": 3, "action_dim": 3}, dict.fromkeys(BASES, (32, 32))
    theirs = make_dataset(folder / "three", episodes=(6,), cameras=cameras, **dims)
    make_dataset(folder / "pair", episodes=(6, 5, 4), **dims)
    make_base(folder / "pi05", load_metadata(theirs), chunk_size=4, **in_process.TINY)
    names = json.dumps({WRIST: BASES[0], TOP: BASES[1]})
    return [f"--policy.path={folder / 'pi05'}", f"--dataset.root={folder / 'pair'}", f"--rename_map={names}"]


def select_actions(policy, pre, post, observations):
    torch.manual_seed(0)
    policy.reset()
    with torch.no_grad():
        return torch.cat([post(policy.select_action(pre(dict(observation)))) for observation in observations])


def test_export_has_camera_names_of_robot_and_plays_in_lerobot_bitwise(folder, renamed, tmp_path):
    """LeRobot's tools replace a saved rename step by an empty one."""
    run = trained(folder, *renamed, f"--output_dir={tmp_path / 'run'}")
    where = exported(run)
    config, shapes = json.loads((where / "config.json").read_text()), features_of(folder / "pair")
    inputs = {WRIST: shapes[WRIST], TOP: shapes[TOP], BASES[2]: {"type": "VISUAL", "shape": [3, 32, 32]}}
    assert list(config["input_features"]) == [WRIST, TOP, BASES[2], "observation.state"]
    assert config["input_features"] == {**inputs, "observation.state": shapes["observation.state"]}
    assert all("policy" not in camera for camera in facts_of(where)["cameras"].values())

    checkpoint = exported_checkpoint(run.job, best=False)
    reference, processors = policy_at(run.policy, checkpoint).eval(), run.policy.processors()
    policy = get_policy_class(config["type"]).from_pretrained(where)
    rollouts = {"rename_observations_processor": {"rename_map": {}}}  # as rollout, server and eval build them
    plain = make_pre_post_processors(policy.config, pretrained_path=str(where), preprocessor_overrides=rollouts)
    observations = [random_observation(shapes) for _ in range(3)]
    actions = select_actions(policy, *plain, observations)
    names = run.robots[0].rename_map
    theirs = [{names.get(key, key): value for key, value in observation.items()} for observation in observations]
    torch.testing.assert_close(actions, select_actions(reference, *processors, theirs), rtol=0, atol=0)

    next_run = trained(folder, renamed[1], f"--policy.path={where}", "--output_dir=x")
    assert next_run.policy.config.input_features == policy.config.input_features
    assert not next_run.robots[0].rename_map
    with pytest.raises(ValueError, match=f"it has '{TOP}' already, leave that out"):
        trained(folder, *renamed[1:], f"--policy.path={where}", "--output_dir=x")


def test_camera_names_of_policy_are_exported_if_a_robots_name_is_ambiguous(folder, renamed, tmp_path):
    """The dataset's camera has the name of a masked camera of the policy."""
    make_dataset(tmp_path / "data", episodes=(6,), cameras={BASES[1]: (96, 80)}, state_dim=3, action_dim=3)
    names = json.dumps({BASES[1]: BASES[0]})
    flags = [renamed[0], f"--dataset.root={tmp_path / 'data'}", f"--rename_map={names}"]
    run = trained(folder, *flags, f"--output_dir={tmp_path / 'run'}")
    assert f"{BASES[1]} is also the name of another camera of the policy" in describe(run)
    assert f"lerobot-eval need --rename_map='{names}'" in describe(run)
    where = exported(run)
    config = json.loads((where / "config.json").read_text())
    assert list(config["input_features"])[:3] == BASES
    assert steps_of(where, "pre")["rename_observations_processor"] == {"rename_map": {BASES[1]: BASES[0]}}
    assert facts_of(where)["cameras"][BASES[1]]["policy"] == BASES[0]
