"""Instructions passed to policies as text, through columns of bytes, to runs and LeRobot exports."""

import json
import pickle

import numpy as np
import pytest
import torch
from lerobot.policies.factory import get_policy_class, make_pre_post_processors

from tests import in_process
from tests.datasets import make_dataset
from tests.tiny_backbones import KINDS
from tests.training.test_as_lerobot import resolved
from util import NumpyToTorchCollate, cuda_prefetcher
from vla_finetuning.columns import TASK_BYTES
from vla_finetuning.evaluation.open_loop import open_loop_errors
from vla_finetuning.policies.registry import FAMILIES
from vla_finetuning.policies.texts import LONGEST_BYTES, as_bytes, with_texts
from vla_finetuning.training.checkpoint_writer import CheckpointWriter
from vla_finetuning.training.export import export, exported_checkpoint
from vla_finetuning.training.feed import policy_batches
from vla_finetuning.training.model import make_prepare

READERS = [kind for kind in KINDS if kind in FAMILIES and FAMILIES[kind].reads_texts]
TEXTS = ["go to the red bin", "", "拿起瓶子", "two\nlines ", "é" * (LONGEST_BYTES // 2)]


def test_texts_survive_byte_column_round_trip_or_are_refused():
    column = as_bytes(TEXTS)
    assert column.dtype == np.uint8 and column.shape == (len(TEXTS), LONGEST_BYTES)
    (batch,) = cuda_prefetcher([NumpyToTorchCollate(False)({TASK_BYTES: column})], torch.device("cpu"))
    assert with_texts(batch) == {"task": TEXTS}
    textless = {"action": torch.zeros(1)}
    assert with_texts(textless) is textless
    for text in ("a" * (LONGEST_BYTES + 1), "é" * (LONGEST_BYTES // 2 + 1), "a\0b"):
        with pytest.raises(ValueError, match=rf"instruction .* has [\d,]+ bytes: at most {LONGEST_BYTES:,}.*shorten"):
            as_bytes(["go", text])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    cameras = {"observation.images.top": (48, 64)}
    return make_dataset(tmp_path_factory.mktemp("texts") / "dataset", episodes=(12, 9, 10), cameras=cameras)


@pytest.mark.parametrize("kind", ["act", *READERS])
def test_text_column_is_prepared_only_for_text_policies(dataset, tmp_path, kind):
    with KINDS[kind].here():
        run = resolved(dataset, kind, tmp_path)
        rows = next(run.rows.source(stream=(0, run.rows.last_row)).read_rows(list(range(12)), 12))
        prepared = pickle.loads(pickle.dumps(make_prepare(run.policy, run.rows)))(rows)
    assert not [key for key, column in prepared.items() if column.dtype.kind not in "biuf"]
    reads = FAMILIES[kind].reads_texts
    assert reads == (kind != "act") == (TASK_BYTES in prepared)
    (batch,) = policy_batches([NumpyToTorchCollate(False)(prepared)], run.policy.config)
    assert batch.get("task") == (list(rows["task"]) if reads else None)
    assert len(set(rows["task"])) == 2


def test_too_long_instruction_is_refused_by_plan(tmp_path):
    cameras = {"observation.images.top": (48, 64)}
    root = make_dataset(tmp_path / "dataset", episodes=(12, 9), cameras=cameras, tasks=("go", "to " * 400))
    with pytest.raises(ValueError, match="the instruction 'to to .* has 1,200 bytes"):
        resolved(root, "evo1", tmp_path)
    resolved(root, "act", tmp_path)


@pytest.mark.parametrize("kind", READERS)
def test_lerobot_loads_export_and_actions_follow_instruction(dataset, tmp_path, kind):
    with KINDS[kind].here():
        camera = "observation.images.image"  # which FastWAM has from the start
        run = resolved(dataset, kind, tmp_path, steps=1, rename_map=json.dumps({"observation.images.top": camera}))
        assert list(run.policy.config.image_features) == [camera]
        trained = in_process.train(run, worker=in_process.alone(run), make_checkpoints=CheckpointWriter).named()
        export(run.policy, exported_checkpoint(run.job, best=False), run.job.output_dir)
        folder = run.job.output_dir / "pretrained_model"
        policy = get_policy_class(kind).from_pretrained(folder)
        loaded = policy.state_dict()
        assert all(torch.equal(value, loaded[name]) for name, value in trained.items())
        rollouts = {"rename_observations_processor": {"rename_map": {}}}  # as LeRobot's own tools replace it
        before, after = make_pre_post_processors(
            policy.config, pretrained_path=str(folder), preprocessor_overrides=rollouts
        )
        rows = next(run.rows.source(stream=(0, run.rows.last_row)).read_rows([0, 1, 2], 3))
        rows = {run.robots[0].own_names.get(key, key): values for key, values in rows.items()}
        replacements = {"go to the red bin": "blue", "go to the blue bin": "red"}
        errors = open_loop_errors(
            policy, before, after, [rows], mean_action=np.zeros(3), other_instruction=replacements
        )
    assert 0 < errors["policy"]["mse"] != errors["other_instruction"]["mse"] > 0
