"""Matching of dataset features to policy features against LeRobot's own rules; errors name mismatches."""

import copy
import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.policies.factory import make_policy as make_lerobot_policy
from lerobot.policies.fastwam.configuration_fastwam import FastWAMConfig
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.vla_jepa.configuration_vla_jepa import VLAJEPAConfig
from lerobot.utils.constants import ACTION, OBS_STATE

from tests.tiny import ACTION_DIM, STATE_DIM, make_config
from vla_finetuning.policies.matching import match_features
from vla_finetuning.policies.own_names import own_camera_names


@dataclass(frozen=True)
class Feature:
    dtype: str
    shape: tuple
    names: object = None


def camera(height=48, width=64):
    return Feature("video", (height, width, 3), ("height", "width", "channels"))


def dataset_features(*cameras, state=STATE_DIM, action=ACTION_DIM, **others):
    return {
        **{f"observation.images.{name}": camera() for name in cameras},
        OBS_STATE: Feature("float32", (state,)),
        ACTION: Feature("float32", (action,), tuple(f"motor_{i}" for i in range(action))),
        "timestamp": Feature("float32", (1,)),
        "index": Feature("int64", (1,)),
        **others,
    }


def pretrained_config(*cameras, **options):
    """Make a config as of lerobot/pi05_base: named cameras and a padded state."""
    config = PI05Config(device="cpu", chunk_size=4, n_action_steps=4, **options)
    config.input_features = {
        **{f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, 224, 224)) for name in cameras},
        OBS_STATE: PolicyFeature(FeatureType.STATE, (32,)),
    }
    config.output_features = {ACTION: PolicyFeature(FeatureType.ACTION, (32,))}
    return config


def as_metadata(features, fps=10):
    described = {key: {"dtype": f.dtype, "shape": f.shape, "names": f.names} for key, f in features.items()}
    return SimpleNamespace(features=described, fps=fps, stats=None)


@pytest.mark.parametrize("state", [STATE_DIM, STATE_DIM + 1])
def test_policy_with_dataset_hook_gets_dataset_features(state):
    """FastWAM takes the dataset's cameras at its own size; pretrained VLA-JEPA may lack the state."""
    features = dataset_features("top", "wrist", state=state)
    visual = PolicyFeature(FeatureType.VISUAL, (3, 48, 64))
    ours = [
        FastWAMConfig(action_dim=ACTION_DIM, proprio_dim=STATE_DIM, device="cpu"),
        VLAJEPAConfig(
            device="cpu", input_features={"observation.images.top": visual, "observation.images.wrist": visual}
        ),
    ]
    for config in ours:
        theirs = copy.deepcopy(config)
        theirs.output_features = {ACTION: PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))}
        theirs.set_dataset_feature_metadata(as_metadata(features).features)
        if config.type == "fastwam" and state != STATE_DIM:
            with pytest.raises(ValueError, match=rf"proprio_dim is {STATE_DIM}: give --policy.proprio_dim={state}"):
                match_features(config, features, fps=10)
            continue
        match_features(config, features, fps=10)
        assert config.input_features == theirs.input_features and OBS_STATE in theirs.input_features


def test_fresh_policy_takes_dataset_features():
    features = dataset_features("top", "wrist")
    ours, theirs = make_config(1), make_config(1)
    ours.input_features, theirs.input_features = {}, {}
    match = match_features(ours, features, fps=10)
    make_lerobot_policy(theirs, ds_meta=as_metadata(features))
    assert ours.input_features == theirs.input_features
    assert ours.output_features == theirs.output_features
    assert ours.action_feature_names == theirs.action_feature_names == ["motor_0", "motor_1", "motor_2"]
    assert match.camera_keys == ("observation.images.top", "observation.images.wrist")
    assert match.keys == (*match.camera_keys, OBS_STATE, ACTION)


def test_pretrained_policy_takes_dataset_shapes_under_its_input_names():
    config = pretrained_config("base", "wrist")
    own_names = {"observation.images.base": "observation.images.top"}
    match = match_features(config, dataset_features("base", "wrist"), own_names, fps=30)
    assert config.input_features == {
        "observation.images.base": PolicyFeature(FeatureType.VISUAL, (3, 48, 64)),
        "observation.images.wrist": PolicyFeature(FeatureType.VISUAL, (3, 48, 64)),
        OBS_STATE: PolicyFeature(FeatureType.STATE, (STATE_DIM,)),
    }
    assert config.output_features == {ACTION: PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))}
    assert match.camera_keys == ("observation.images.base", "observation.images.wrist")
    assert match.table() == [
        "observation.images.top    48x64x3  ->  observation.images.base   3x224x224  IDENTITY",
        "observation.images.wrist  48x64x3  ->  observation.images.wrist  3x224x224  IDENTITY",
        "observation.state         4        ->  observation.state         32         QUANTILES",
        "action                    3        ->  action                    3          QUANTILES",
    ]


def test_delta_timestamps_cover_only_policy_features():
    features = dataset_features("top", **{"next.reward": Feature("float32", (1,))})
    config = DiffusionConfig(device="cpu", input_features={})
    expected = match_features(config, features, fps=29.97).delta_timestamps
    assert expected["observation.images.top"] == [-1 / 29.97, 0] and expected[ACTION][2] == 1 / 29.97
    more = features | {"observation.effort": Feature("float32", (3,)), "observation.note": Feature("string", (1,))}
    assert match_features(config, more, {}, fps=29.97).delta_timestamps == expected


def test_unmatched_cameras_error_suggests_remedy():
    config = pretrained_config("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    features = dataset_features("right_wrist", "base", "left_wrist")
    with pytest.raises(ValueError) as caught:
        match_features(config, features, fps=10)
    message = str(caught.value)
    assert "--dataset.camera_keys" in message and "--dataset.missing_cameras=mask" in message
    rename_map = json.loads(message.split("--rename_map='")[1].split("'")[0])
    assert rename_map == {
        "observation.images.base": "observation.images.base_0_rgb",
        "observation.images.left_wrist": "observation.images.left_wrist_0_rgb",
        "observation.images.right_wrist": "observation.images.right_wrist_0_rgb",
    }
    own_names = {"observation.images.a": "observation.images.x"}
    with pytest.raises(ValueError) as caught:
        match_features(pretrained_config("a", "b"), dataset_features("a", "y"), own_names, fps=10)
    suggested = json.loads(str(caught.value).split("--rename_map='")[1].split("'")[0])
    assert suggested == {"observation.images.x": "observation.images.a", "observation.images.y": "observation.images.b"}
    message = r"not among those chosen \(\['observation.images.b'\] are left out\).*Either choose more cameras"
    with pytest.raises(ValueError, match=message):
        match_features(pretrained_config("a", "b"), dataset_features("a"), fps=10, excluded=["observation.images.b"])


def test_missing_cameras_are_masked_on_request_and_empty_ones_always():
    config = pretrained_config("top", "wrist", "front")
    features = dataset_features("wrist")
    with pytest.raises(ValueError, match="lacks: .'observation.images.top', 'observation.images.front'.*=mask"):
        match_features(config, features, fps=10)
    match = match_features(config, features, fps=10, missing_cameras="mask")
    assert match.camera_keys == ("observation.images.wrist",)
    masked = [row.policy_key for row in match.rows if row.dataset_key is None]
    assert masked == ["observation.images.top", "observation.images.front"]
    assert " ".join(match.table()[0].split()) == "(no camera) masked -> observation.images.top 3x224x224 IDENTITY"
    # Masking needs one camera, no unmatched dataset camera, and a policy that supports it.
    with pytest.raises(ValueError, match="does not know.*--dataset.camera_keys"):
        match_features(config, dataset_features("wrist", "other"), fps=10, missing_cameras="mask")
    with pytest.raises(ValueError, match="lacks"):
        match_features(config, dataset_features(), fps=10, missing_cameras="mask")
    act = ACTConfig(device="cpu", input_features=pretrained_config("top", "wrist").input_features)
    with pytest.raises(ValueError, match="lacks") as caught:
        match_features(act, dataset_features("top"), fps=10, missing_cameras="mask")
    assert "mask" not in str(caught.value)
    match = match_features(pretrained_config("top", empty_cameras=1), dataset_features("top"), fps=10)
    assert [row.policy_key for row in match.rows if row.dataset_key is None] == ["observation.images.empty_camera_0"]


def test_pi05_state_absent_from_config_becomes_input():
    """PI0.5's constructor would add it too late for the processors to normalise it."""
    config = pretrained_config("top")
    del config.input_features[OBS_STATE]
    match = match_features(config, dataset_features("top"), fps=10)
    assert OBS_STATE in match.keys and OBS_STATE in config.input_features
    features = dataset_features("top")
    del features[OBS_STATE]
    del config.input_features[OBS_STATE]
    with pytest.raises(ValueError, match="needs 'observation.state'"):
        match_features(config, features, fps=10)


@pytest.mark.parametrize(
    "changes, own_names, message",
    [
        ({OBS_STATE: None}, {}, r"needs 'observation.state'.*features are .*--rename_map"),
        ({ACTION: None}, {}, r"no 'action'; its features are"),
        ({OBS_STATE: Feature("float32", (33,))}, {}, r"state' has 33 dimensions.*takes 32 \(max_state_dim\)"),
        ({ACTION: Feature("float32", (40,))}, {}, r"'action' has 40 dimensions.*takes 32 \(max_action_dim\)"),
        ({ACTION: Feature("float32", (1,))}, {}, r"'action' has the shape \(1,\).*two or more"),
        ({OBS_STATE: Feature("float32", (2, 3))}, {}, r"'observation.state' has the shape \(2, 3\)"),
        ({"observation.images.top": Feature("video", (48, 64, 1))}, {}, r"\(48, 64, 1\); policies see RGB.*camera_key"),
        (
            {"observation.images.tpo": camera()},
            {"observation.images.tpo": "observation.images.b"},
            r'has "observation.images.b": "observation.images.tpo", and the policy\'s inputs are',
        ),
    ],
)
def test_unmatched_features_are_refused(changes, own_names, message):
    features = {**dataset_features("top"), **changes}
    config = pretrained_config("top")
    with pytest.raises(ValueError, match=message):
        match_features(config, {key: f for key, f in features.items() if f is not None}, own_names, fps=10)


def test_channel_first_cameras_match_and_texts_are_ignored():
    features = {
        **dataset_features(),
        "observation.images.top": Feature("image", (3, 48, 64), ("channels", "height", "width")),
        "observation.note": Feature("string", (1,)),
    }
    config = make_config(1)
    config.input_features = {}
    match_features(config, features, fps=10)
    assert config.image_features["observation.images.top"].shape == (3, 48, 64)
    assert "observation.note" not in config.input_features


def test_fastwam_camera_names_change_only_if_order_is_preserved():
    """FastWAM puts `sorted` cameras side by side, whatever its configuration says."""
    first, second, left, right = (f"observation.images.{name}" for name in ("a", "b", "left", "right"))
    inputs = {key: PolicyFeature(FeatureType.VISUAL, (3, 224, 224)) for key in (first, second)}
    inputs[OBS_STATE] = PolicyFeature(FeatureType.STATE, (8,))
    outputs = {ACTION: PolicyFeature(FeatureType.ACTION, (7,))}
    config = FastWAMConfig(device="cpu", input_features=inputs, output_features=outputs)
    assert own_camera_names(config, {left: first, right: second}) == ({first: left, second: right}, "")
    assert "orders cameras by name" in own_camera_names(config, {right: first, left: second})[1]
    act = ACTConfig(device="cpu", input_features=inputs, output_features=outputs)
    assert own_camera_names(act, {right: first, left: second}) == ({first: right, second: left}, "")


def test_second_dataset_with_other_crop_input_size_is_refused():
    config = DiffusionConfig(device="cpu", input_features={}, crop_shape=(40, 40))
    match_features(config, dataset_features("top"), fps=10)
    match_features(config, dataset_features("top"), fps=10)
    features = dataset_features("top") | {"observation.images.top": camera(96, 128)}
    with pytest.raises(ValueError, match=r"has images of \(3, 96, 128\), and the policy's are \(3, 48, 64\)"):
        match_features(config, features, fps=10)
