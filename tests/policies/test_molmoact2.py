"""MolmoAct2's gripper, found by the dataset's names, against LeRobot's own processors."""

import copy

import numpy as np
import pytest
import torch
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.molmoact2.configuration_molmoact2 import MolmoAct2Config
from lerobot.utils.constants import ACTION, OBS_STATE

from tests.policies.test_match_features import Feature, as_metadata, camera
from tests.tiny_backbones import MOLMOACT2, molmo
from vla_finetuning.policies.matching import match_features
from vla_finetuning.policies.pipelines import make_processors
from vla_finetuning.policies.processors import DeviceHalf, Prepare
from vla_finetuning.policies.texts import with_texts

NAMES = ("shoulder", "elbow", "gripper")
TOP = "observation.images.top"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    chunk = {"chunk_size": 4, "n_action_steps": 4}
    return MolmoAct2Config(**molmo(tmp_path_factory.mktemp("molmo")), **chunk, model_dtype="float32", device="cpu")


def test_saved_processors_leave_gripper_unnormalised(config, tmp_path):
    features = {TOP: camera(), **{key: Feature("float32", (3,), NAMES) for key in (OBS_STATE, ACTION)}}
    assert MOLMOACT2.options["chunk_size"] == config.chunk_size
    ours, theirs = copy.deepcopy(config), copy.deepcopy(config)
    match_features(ours, features, {}, fps=10)
    theirs.input_features, theirs.output_features = ours.input_features, ours.output_features
    theirs.set_dataset_feature_metadata(as_metadata(features).features)
    assert ours.dataset_feature_names == theirs.dataset_feature_names != {}

    stats = {key: {"q01": np.full(3, -0.5), "q99": np.array([0.5, 1.5, 0.5])} for key in (OBS_STATE, ACTION)}
    expected, _ = make_pre_post_processors(theirs, dataset_stats=stats)
    for part in make_pre_post_processors(theirs, dataset_stats=stats):
        part.save_pretrained(tmp_path)
    generator = np.random.default_rng(0)
    rows = {key: generator.uniform(-0.4, 0.4, (2, *shape, 3)) for key, shape in ((OBS_STATE, ()), (ACTION, (4,)))}
    rows = {key: value.astype(np.float32) for key, value in rows.items()} | {"action_is_pad": np.zeros((2, 4), bool)}
    images, tasks = generator.integers(0, 256, (2, 48, 64, 3), dtype=np.uint8), ["go", "go to the red bin"]
    expected_batch = expected(
        {key: torch.from_numpy(value) for key, value in rows.items()}
        | {TOP: torch.from_numpy(images).movedim(-1, 1) / 255, "task": tasks}
    )
    for folder in (None, tmp_path):
        preprocessor, _ = make_processors(folder, ours, stats)
        prepare = Prepare(preprocessor, [TOP], ours, texts=True)
        prepared = prepare({**rows, TOP: images, "task": np.array(tasks, object)})
        actual = DeviceHalf(preprocessor, ours)(with_texts({k: torch.from_numpy(v) for k, v in prepared.items()}))
        for key in (ACTION, OBS_STATE, "input_ids", "attention_mask", "labels", "pixel_values", "action_dim_is_pad"):
            assert torch.equal(actual[key], expected_batch[key]), key
        assert np.array_equal(actual[ACTION][..., 2], rows[ACTION][..., 2])
        assert not np.allclose(actual[ACTION][..., 1], rows[ACTION][..., 1])
