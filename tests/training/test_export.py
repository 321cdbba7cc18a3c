"""What an export says of itself: of what was trained, and not of what the run started from."""

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
from vla_finetuning.training.export import export, exported_checkpoint, exported_config, policy_at

TOP, WRIST = "observation.images.top", "observation.images.wrist"
# Of somebody's policy for another robot.
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
    """Datasets of 26 joints and of 4, and a tiny policy for 3, whose cameras have another size."""
    folder = tmp_path_factory.mktemp("export")
    small = {TOP: (32, 32), WRIST: (32, 32)}
    theirs = make_dataset(folder / "theirs", episodes=(6,), cameras=small, state_dim=3, action_dim=3)
    make_dataset(folder / "humanoid", episodes=(6, 5, 4), state_dim=26, action_dim=26)
    make_dataset(folder / "arm", episodes=(6, 5, 4), cameras={TOP: (60, 80)}, state_dim=4, action_dim=4)
    base = make_base(folder / "base", load_metadata(theirs), chunk_size=4, **in_process.TINY)
    edit(base / "config.json", lambda config: config | STALE)

    def relative(pipeline):
        for step in pipeline["steps"]:
            of_step = step["config"]
            of_step |= {"enabled": True} if "enabled" in of_step else {}
            of_step |= {"max_length": STALE["tokenizer_max_length"]} if "max_length" in of_step else {}
        return pipeline

    for name in ("pre", "post"):
        edit(base / f"policy_{name}processor.json", relative)
    return folder


def edit(path, change):
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def trained(folder, *flags, mode="full"):
    options = [f"--policy.path={folder / 'base'}", f"--train.mode={mode}", "--scaling.use_gpu=false", "--batch_size=2"]
    options += ["--policy.use_relative_actions=false", "--dataset.missing_cameras=mask", "--steps=1"]
    return resolve(parse_args([*options, *flags]), gpus_found=0)


def exported(run):
    in_process.train(run, worker=in_process.alone(run), make_checkpoints=CheckpointWriter)
    export(run.policy, exported_checkpoint(run.job, best=False), run.job.output_dir)
    return run.job.output_dir / "pretrained_model"


def features_of(root):
    """By LeRobot's names for them: images channel-first."""
    features = json.loads((root / "meta" / "info.json").read_text())["features"]
    kinds = {"observation.state": "STATE", "action": "ACTION", TOP: "VISUAL", WRIST: "VISUAL"}
    return {
        key: {"type": kind, "shape": [3, *shape[:2]] if kind == "VISUAL" else shape}
        for key, kind in kinds.items()
        if key in features
        for shape in [features[key]["shape"]]
    }


def steps_of(where, name):
    steps = json.loads((where / f"policy_{name}processor.json").read_text())["steps"]
    return {step["registry_name"]: step["config"] for step in steps}


def check_is_of(where, root):
    """Compare an export with its dataset, and have plain LeRobot act by it."""
    config, features = json.loads((where / "config.json").read_text()), features_of(root)
    assert {**config["input_features"], **config["output_features"]} == features
    dims = features["action"]["shape"][0]
    assert config["action_feature_names"] == [f"motor_{number}" for number in range(dims)]
    before, after = steps_of(where, "pre"), steps_of(where, "post")
    assert before["normalizer_processor"]["features"] == features
    assert after["unnormalizer_processor"]["features"] == {"action": features["action"]}
    assert before["normalizer_processor"]["norm_map"] == config["normalization_mapping"]
    facts, told = json.loads((where / "robot.json").read_text()), LeRobotDatasetMetadata("local/x", root=root)
    assert facts["fps"] == told.fps and facts["action_kind"] == "absolute"
    assert facts["action"] == list(told.features["action"]["names"])
    assert facts["observation.state"] == list(told.features["observation.state"]["names"])
    assert {name: (of["height"], of["width"]) for name, of in facts["cameras"].items()} == {
        key: tuple(told.features[key]["shape"][:2]) for key in told.camera_keys if key in features
    }
    assert facts["instructions"] == sorted(told.tasks.index)
    assert (facts["chunk_size"], facts["n_action_steps"]) == (config["chunk_size"], config["n_action_steps"])
    assert not before["relative_actions_processor"]["enabled"] and not after["absolute_actions_processor"]["enabled"]

    policy = get_policy_class(config["type"]).from_pretrained(where)
    pre, post = make_pre_post_processors(policy.config, pretrained_path=str(where))
    seen = {key: torch.rand(1, *feature["shape"]) for key, feature in features.items() if key != "action"}
    with torch.no_grad():
        action = post(policy.select_action(pre({**seen, "task": ["go to the red bin"]})))
    assert action.shape == (1, dims)
    return config


def test_an_export_describes_what_was_trained(folder, tmp_path):
    run = trained(folder, f"--dataset.root={folder / 'humanoid'}", f"--output_dir={tmp_path / 'run'}")
    where = exported(run)
    config = check_is_of(where, folder / "humanoid")
    none = {"repo_id": None, "tags": None, "private": None, "pretrained_path": None, "pretrained_revision": None}
    none |= {"device": None, "use_peft": False, "push_to_hub": True, "use_relative_actions": False}
    none |= dict.fromkeys(
        ("train_expert_only", "freeze_vision_encoder", "compile_model", "gradient_checkpointing"), False
    )
    assert {name: config[name] for name in none} == none
    assert config["license"] == STALE["license"]  # also that of what is derived
    base = json.loads((folder / "base" / "config.json").read_text())
    changed = {*none, "input_features", "output_features", "action_feature_names"}
    assert {name for name in base if base[name] != config[name]} <= changed and base.keys() == config.keys()

    again = trained(folder, f"--dataset.root={folder / 'humanoid'}", f"--policy.path={where}", "--output_dir=x")
    assert again.policy.config.input_features == run.policy.config.input_features
    assert again.policy.start().config.output_features["action"].shape == (26,)


def test_a_policy_that_was_trained_with_given_actions_says_so(folder, tmp_path):
    data = f"--dataset.root={folder / 'humanoid'}"
    run = trained(folder, data, "--policy.rtc_training_max_delay=2", f"--output_dir={tmp_path / 'run'}")
    assert "the first 0 to 2 actions of a chunk are given" in describe(run)
    where = exported(run)
    check_is_of(where, folder / "humanoid")
    assert json.loads((where / "robot.json").read_text())["rtc_training_max_delay"] == 2
    edit(where / "robot.json", lambda facts: facts | {"instructions_end_with": ", Advantage: positive"})
    again = trained(folder, data, f"--policy.path={where}", "--output_dir=x")
    assert again.policy.config.rtc_training_max_delay == 2
    # As GRPO exports it.
    own_names, config = {TOP: "observation.images.front"}, copy.deepcopy(again.policy.config)
    config.n_action_steps = 2
    files = learned_files(where, config, own_names, {})
    robot = replace(again.robots[0], config=config, own_names=own_names, files=files)
    export(again.policy.select_robot(robot), exported_checkpoint(run.job, best=False), tmp_path / "grpo")
    facts = json.loads((tmp_path / "grpo" / "pretrained_model" / "robot.json").read_text())
    assert facts["rtc_training_max_delay"] == 2
    assert (facts["n_action_steps"], facts["instructions_end_with"]) == (2, "")
    config = json.loads((tmp_path / "grpo" / "pretrained_model" / "config.json").read_text())
    assert config["n_action_steps"] == 2
    cameras = {name for name, feature in config["input_features"].items() if feature["type"] == "VISUAL"}
    assert facts["cameras"].keys() == cameras == {"observation.images.front", WRIST}
    off = trained(folder, data, f"--policy.path={where}", "--policy.rtc_training_max_delay=0", "--output_dir=x")
    assert "rtc_training_max_delay" not in off.robots[0].files["robot.json"] and "are given" not in describe(off)

    # LeRobot's own real-time chunking guides it, as any.
    policy = get_policy_class("tiny_pi05").from_pretrained(where)
    policy.config.rtc_config = RTCConfig(execution_horizon=3)
    policy.init_rtc_processor()
    pre, _ = make_pre_post_processors(policy.config, pretrained_path=str(where))
    seen = {key: torch.rand(1, *of["shape"]) for key, of in features_of(folder / "humanoid").items() if key != "action"}
    batch, noise = pre({**seen, "task": ["go to the red bin"]}), torch.randn(1, 4, policy.config.max_action_dim)
    plain, guided = (
        policy.predict_action_chunk(batch, noise=noise, inference_delay=1, prev_chunk_left_over=left)
        for left in (None, torch.full((1, 3, 26), 0.5))
    )
    assert (guided - 0.5)[:, 0].abs().max() < 0.5 * (plain - 0.5)[:, 0].abs().max()


def test_freeze_flags_are_the_runs(folder):
    for mode, part in {"full": False, "expert": True}.items():
        run = trained(folder, f"--dataset.root={folder / 'humanoid'}", "--output_dir=x", mode=mode)
        config = exported_config(run.policy)
        assert (config.train_expert_only, config.freeze_vision_encoder) == (part, part), mode
    assert {"train_expert_only", "freeze_vision_encoder"} <= family_of(config).ignored_options.keys()


def test_each_robot_of_a_mixture_has_its_own(folder, tmp_path):
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
        check_is_of(where / name, folder / name)


def test_names_of_dimensions_are_not_those_of_another_robot(folder, tmp_path):
    root = make_dataset(tmp_path / "unnamed", episodes=(6,), state_dim=5, action_dim=5)
    edit(root / "meta" / "info.json", lambda info: (info["features"]["action"].update(names=None), info)[1])
    run = trained(folder, f"--dataset.root={root}", "--output_dir=x")
    assert run.policy.config.action_feature_names is None


def test_a_policy_of_a_fixed_width_says_that_it_is_for_another(folder, tmp_path):
    """ACT, which pads nothing, so that the base's weights do not fit the dataset: known before a worker starts."""
    config = act_config(policy_features(folder / "theirs"), chunk_size=4, n_action_steps=4)
    stats = {key: {name: torch.ones(3) for name in ("mean", "std")} for key in ("observation.state", "action")}
    stats |= {key: {name: torch.ones(3, 1, 1) for name in ("mean", "std")} for key in (TOP, WRIST)}
    save_pretrained(ACTPolicy(config), *make_pre_post_processors(config, dataset_stats=stats), tmp_path / "act")
    flags = [f"--policy.path={tmp_path / 'act'}", "--steps=1", "--scaling.use_gpu=false", "--train.mode=full"]
    with pytest.raises(ValueError, match=r"of another shape: .*\(found \(\d+, 3\), expected \(\d+, 26\)\)"):
        resolve(parse_args([*flags, f"--dataset.root={folder / 'humanoid'}", "--output_dir=x"]), gpus_found=0)


def policy_features(root):
    return {
        key: PolicyFeature(FeatureType[feature["type"]], tuple(feature["shape"]))
        for key, feature in features_of(root).items()
        if key != "action"
    }


BASES = [f"observation.images.{name}_0_rgb" for name in ("base", "left_wrist", "right_wrist")]


@pytest.fixture(scope="module")
def renamed(folder):
    """Flags of a run from a base with other names, as pi05_base's, of which it masks one."""
    theirs = make_dataset(
        folder / "three", episodes=(6,), cameras=dict.fromkeys(BASES, (32, 32)), state_dim=3, action_dim=3
    )
    make_dataset(folder / "pair", episodes=(6, 5, 4), state_dim=3, action_dim=3)
    make_base(folder / "pi05", load_metadata(theirs), chunk_size=4, **in_process.TINY)
    names = json.dumps({WRIST: BASES[0], TOP: BASES[1]})
    return [f"--policy.path={folder / 'pi05'}", f"--dataset.root={folder / 'pair'}", f"--rename_map={names}"]


def select_actions(policy, pre, post, seen):
    torch.manual_seed(0)
    policy.reset()
    with torch.no_grad():
        return torch.cat([post(policy.select_action(pre(dict(frame)))) for frame in seen])


def test_an_export_has_the_robots_names(folder, renamed, tmp_path):
    """So that LeRobot's tools, which replace a saved rename step by none, play what was trained, bit for bit."""
    run = trained(folder, *renamed, f"--output_dir={tmp_path / 'run'}")
    where = exported(run)
    config, shapes = json.loads((where / "config.json").read_text()), features_of(folder / "pair")
    inputs = {WRIST: shapes[WRIST], TOP: shapes[TOP], BASES[2]: {"type": "VISUAL", "shape": [3, 32, 32]}}
    assert list(config["input_features"]) == [WRIST, TOP, BASES[2], "observation.state"]
    assert config["input_features"] == {**inputs, "observation.state": shapes["observation.state"]}
    assert all("policy" not in size for size in json.loads((where / "robot.json").read_text())["cameras"].values())

    checkpoint = exported_checkpoint(run.job, best=False)
    reference, processors = policy_at(run.policy, checkpoint).eval(), run.policy.processors()
    policy = get_policy_class(config["type"]).from_pretrained(where)
    rollouts = {"rename_observations_processor": {"rename_map": {}}}  # as rollout, server and eval build them
    plain = make_pre_post_processors(policy.config, pretrained_path=str(where), preprocessor_overrides=rollouts)
    cameras = (WRIST, TOP)
    seen = [{key: torch.rand(1, *shapes[key]["shape"]) for key in (*cameras, "observation.state")} for _ in range(3)]
    seen = [{**frame, "task": ["go to the red bin"]} for frame in seen]
    actions = select_actions(policy, *plain, seen)
    (names,) = (robot.rename_map for robot in run.robots)
    theirs = [{names.get(key, key): value for key, value in frame.items()} for frame in seen]
    torch.testing.assert_close(actions, select_actions(reference, *processors, theirs), rtol=0, atol=0)

    again = trained(folder, renamed[1], f"--policy.path={where}", "--output_dir=x")
    assert again.policy.config.input_features == policy.config.input_features and not again.robots[0].rename_map
    with pytest.raises(ValueError, match=f"it has '{TOP}' already, leave that out"):
        trained(folder, *renamed[1:], f"--policy.path={where}", "--output_dir=x")


def test_names_of_the_policy_stay_where_two_cameras_would_have_one(folder, renamed, tmp_path):
    """The dataset calls its first camera as the policy calls one that is masked."""
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
    assert json.loads((where / "robot.json").read_text())["cameras"][BASES[1]]["policy"] == BASES[0]
