"""Prompts with advantage labels: tokens of training rows against LeRobot's own (which rows: test_stream)."""

import numpy as np
import pytest
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.factory import make_pre_post_processors

from tests.datasets import make_dataset
from tests.in_process import make_setting, resolved
from tests.tiny import make_base
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.options.recap import ADVANTAGE
from vla_finetuning.plan.describe import describe
from vla_finetuning.plan.labels import show_labels, write_labels
from vla_finetuning.policies.saving import save_pretrained
from vla_finetuning.policies.tiny_pi05 import TinyPI05Policy
from vla_finetuning.training.model import make_prepare

TEXTS = ("go to the red bin", "go to the blue bin")


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Make a dataset and a policy whose tokenizer has the words of the labels."""
    return setting_of(tmp_path_factory.mktemp("advantage"))


def setting_of(folder, **options):
    root = make_dataset(folder / "dataset", episodes=(6, 5, 4), cameras={"observation.images.top": (32, 32)}, **options)
    meta = load_metadata(root)
    known = [f"{text}{words}" for text in TEXTS for words in ("", *ADVANTAGE.values())]
    return folder, root, make_base(folder / "base", meta, tasks=known)


def tokens_of(run, rows):
    return make_prepare(run.policy, run.rows)(rows)["observation.language.tokens"]


def labelled(setting, **changes):
    folder, _, _ = setting
    run = resolved(setting)
    path = folder / "labels.parquet"
    columns = {"positive": np.arange(15) % 2 == 0, "advantage": np.arange(15.0), "success": np.arange(15) < 6}
    write_labels(path, run.rows.metas, run.rows.episodes, columns)
    return resolved(setting, **{"recap.labels": path, **changes})


def test_policy_whose_tokenizer_lacks_the_labels_is_refused(tmp_path):
    with pytest.raises(ValueError, match="gives .*Advantage: positive.* the same tokens"):
        labelled(make_setting(tmp_path))


def test_labels_change_tokens_and_the_identity_of_the_run(setting):
    plain, run = resolved(setting), labelled(setting)
    assert "Advantages   in prompts" in describe(run) and "53% of the training frames positive" in describe(run)
    assert run.rows.identity != plain.rows.identity
    (rows,) = run.rows.in_stored_order().read_rows([0, 1], 2)
    tokens = tokens_of(run, rows)
    assert not np.array_equal(tokens[0], tokens[1])  # frames of one episode, whose labels differ
    unlabelled = tokens_of(plain, rows)
    assert unlabelled.shape == tokens.shape and not np.array_equal(unlabelled[0], tokens[0])


def test_recorded_advantages_are_removed_before_labels_are_added(tmp_path):
    """Prompts and robot.json equal those of plain texts."""
    recorded = (f"{TEXTS[0]}, Advantage: positive", f"{TEXTS[1]}{ADVANTAGE[True]}{ADVANTAGE[False]}", TEXTS[0])
    runs = []
    for name, tasks in (("plain", (*TEXTS, TEXTS[0])), ("recorded", recorded)):
        setting = setting_of(tmp_path / name, tasks=tasks)
        runs.append((labelled(setting), resolved(setting)))
    (plain, _), (run, unlabelled) = runs
    (expected_rows,), (rows,) = (each.rows.in_stored_order().read_rows(list(range(15)), 15) for each in (plain, run))
    np.testing.assert_array_equal(tokens_of(run, rows), tokens_of(plain, expected_rows))
    assert "not read: the advantage that 2 of 3 tasks end with, as 'go to the red bin, Advantage" in describe(run)
    facts = run.robots[0].files["robot.json"]
    assert facts["instructions"] == sorted(TEXTS) and facts["instructions_end_with"] == ADVANTAGE[True]
    (meta,) = unlabelled.rows.metas  # without labels, a run trains on the recorded texts
    assert set(meta.tasks.values()) == set(recorded) and "not read" not in describe(unlabelled)
    shown, *_ = show_labels(setting[0] / "labels.parquet", meta)
    assert [line.split("  ")[-1] for line in shown[2:]] == list(TEXTS)


def test_labelled_tasks_have_the_same_tokens_in_lerobot_as_in_training(setting, tmp_path):
    run = labelled(setting)
    folder = tmp_path / "exported"
    save_pretrained(run.policy.start(), *run.policy.processors(), folder)
    policy = TinyPI05Policy.from_pretrained(folder)
    preprocess, postprocess = make_pre_post_processors(policy.config, pretrained_path=str(folder))

    dataset = LeRobotDataset("x/tried", setting[1], video_backend="pyav")
    for frame, label in enumerate(("positive", "negative")):
        (rows,) = run.rows.in_stored_order().read_rows([frame], 1)
        expected = tokens_of(run, rows)
        item = dataset[frame]
        observation = {key: item[key] for key in ("observation.images.top", "observation.state")}
        batch = preprocess({**observation, "task": f"{item['task']}, Advantage: {label}"})
        tokens = batch["observation.language.tokens"][:, : expected.shape[1]]
        np.testing.assert_array_equal(tokens.numpy(), expected)
        assert postprocess(policy.predict_action_chunk(batch)).shape == (1, policy.config.chunk_size, 3)
