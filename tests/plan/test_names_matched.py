"""Options that name dimensions, layers and features must match, and the plan lists the matches."""

import json

import pytest
from lerobot.utils.constants import OBS_PREFIX

from tests import in_process
from tests.datasets import make_dataset
from tests.in_process import resolved
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.options.dataset import ImageTransformOptions
from vla_finetuning.plan.describe import describe
from vla_finetuning.plan.mixture import check_same_features
from vla_finetuning.plan.names import with_names
from vla_finetuning.policies.augment import lerobot_step
from vla_finetuning.policies.lora import add_adapters

TOP, WRIST = "observation.images.top", "observation.images.wrist"
RELATIVE = {"policy.use_relative_actions": "true"}


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return in_process.make_setting(tmp_path_factory.mktemp("matched"), episodes=(12, 5, 4))


def test_plan_lists_dimensions_excluded_from_relative_actions(setting):
    joints = {"policy.relative_exclude_joints": '["motor_2", "MOTOR_0"]'}
    plan = describe(resolved(setting, **RELATIVE, **joints))
    assert "predicts 1 of 3 dimensions" in plan
    assert "'motor_2' leaves motor_2 absolute" in plan and "'MOTOR_0' leaves motor_0 absolute" in plan
    # LeRobot's own default, which nobody gave.
    assert "'gripper' is in no name of a dimension" in describe(resolved(setting, **RELATIVE))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({**RELATIVE, "policy.relative_exclude_joints": '["gripper"]'}, "'gripper' is in no name .*motor_0, motor_1"),
        ({**RELATIVE, "policy.relative_exclude_joints": '["motor_1", "moter_2"]'}, "'moter_2'.*did you mean motor_2"),
        ({"policy.relative_exclude_joints": '["motor_1"]'}, "nothing without --policy.use_relative_actions"),
        ({"peft.full_training_modules": '["nothing_there"]'}, "full_training_modules: .* matches no layer"),
        ({"peft.target_modules": '["q_proj", "w_proj"]'}, "target_modules: 'w_proj' matches no layer .*did you mean"),
        ({"peft.target_modules": '["q_proj"]', "peft.full_training_modules": '["lm_head"]'}, "training does not use"),
    ],
)
def test_names_matching_no_dimension_or_layer_are_refused(setting, flags, message):
    with pytest.raises(ValueError, match=message):
        resolved(setting, **flags)


def test_unknown_dimension_map_names_are_refused(setting):
    folder, root, _ = setting
    second = make_dataset(folder / "other", episodes=(4, 5), seed=1)
    two = {"dataset.root": f"{root},{second}"}
    for dimension_map, message in (
        ({"action": {"elbow": "motor_0"}}, "'elbow' for 'action': the dimensions of the datasets are motor_0"),
        ({"action": {"motor_0": "motor_7"}}, "'motor_7' for 'action': .*did you mean motor_"),
    ):
        with pytest.raises(ValueError, match=message):
            resolved(setting, **two, **{"dataset.dimension_map": json.dumps(dimension_map)})
        with pytest.raises(ValueError, match="of a robot's second dataset and those after it"):
            resolved(setting, **{"dataset.dimension_map": json.dumps(dimension_map)})


def test_plan_lists_adapted_layers(setting):
    flags = {"peft.target_modules": '["q_proj", "v_proj"]', "peft.full_training_modules": '["action_out_proj"]'}
    run = resolved(setting, **flags)
    plan, policy = describe(run), run.policy.start()
    add_adapters(policy, run.policy.adapters)
    adapters = [key for key, _ in policy.named_parameters() if ".lora_" in key]
    for name in ("q_proj", "v_proj"):
        assert f"adapters in '{name}': " in plan and any(f".{name}.lora_" in key for key in adapters)
    assert "all of 'action_out_proj': " in plan


def test_unknown_feature_names_in_mixture_are_refused(setting):
    folder, root, _ = setting
    cameras = {"observation.images.front": (48, 64), WRIST: (96, 80)}
    renamed = make_dataset(folder / "renamed", episodes=(4, 5), seed=1, cameras=cameras)
    mixture = {str(root): {}, str(renamed): {"rename_map": {"observation.images.front": TOP}}}
    flags = {"dataset.mixture": json.dumps(mixture)}
    setting_of_mixture = (folder, None, setting[2])

    def plan(**more):
        argv = in_process.flags(setting_of_mixture, **flags, **more)
        return in_process.resolve(parse_args([flag for flag in argv if not flag.startswith("--dataset.root")]), 0)

    assert plan().robots[0].match.keys
    with pytest.raises(ValueError, match='--rename_map has "observation.images.frnt".*did you mean'):
        plan(rename_map='{"observation.images.frnt": "observation.images.top"}')
    with pytest.raises(ValueError, match="--dataset.state_features joints: the datasets' features are"):
        plan(**{"dataset.state_features": "joints"})


def test_member_rename_map_decides_camera_identity(setting):
    meta = load_metadata(setting[1])
    base, other = (f"{OBS_PREFIX}{name}" for name in ("base", "other"))
    a, b = with_names([meta, meta], {}, own_maps=[{TOP: base}, {TOP: other}])
    with pytest.raises(ValueError, match="second lacks .*base'.*; give equal ones equal names"):  # no flag renames it
        check_same_features([a, b], [base])
    a, b = with_names([meta, meta], {TOP: base}, own_maps=[{}, {TOP: other, WRIST: base}])
    assert (a.features[base].key, b.features[base].key) == (TOP, WRIST)
    assert b.video_files[base] == meta.video_files[WRIST] and b.video_files[other] == meta.video_files[TOP]
    with pytest.raises(ValueError, match=rf"{WRIST}'.* would all be called '{WRIST}'"):
        with_names([meta], {TOP: WRIST})


def test_image_transforms_without_effect_are_refused(setting):
    dark = {"weight": 0.0, "type": "ColorJitter", "kwargs": {"brightness": [0.5, 0.9]}}
    with pytest.raises(ValueError, match="dark have weight 0"):
        lerobot_step(ImageTransformOptions(enable=True, tfs={"dark": dark}))
    with pytest.raises(ValueError, match="tfs={.*} does nothing without --dataset.image_transforms.enable"):
        parse_args(in_process.flags(setting, **{"dataset.image_transforms.tfs": json.dumps({"dark": dark})}))
