"""Instructions that name an advantage reach the policy; which rows have one, test_stream shows."""

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
def told(tmp_path_factory):
    """A folder, a dataset, and a policy that knows the words."""
    return setting_of(tmp_path_factory.mktemp("advantage"))


def setting_of(folder, **options):
    root = make_dataset(folder / "dataset", episodes=(6, 5, 4), cameras={"observation.images.top": (32, 32)}, **options)
    meta = load_metadata(root)
    known = [f"{text}{words}" for text in TEXTS for words in ("", *ADVANTAGE.values())]
    return folder, root, make_base(folder / "base", meta, tasks=known)


def labelled(setting, **changes):
    folder, _, _ = setting
    run = resolved(setting)
    path = folder / "labels.parquet"
    columns = {"positive": np.arange(15) % 2 == 0, "advantage": np.arange(15.0), "success": np.arange(15) < 6}
    write_labels(path, run.rows.metas, run.rows.episodes, columns)
    return resolved(setting, **{"recap.labels": path, **changes})


def test_a_policy_that_does_not_know_the_words_is_refused(tmp_path):
    with pytest.raises(ValueError, match="gives .*Advantage: positive.* the same tokens"):
        labelled(make_setting(tmp_path))


def test_labels_reach_the_policys_tokens_and_the_runs_identity(told):
    plain, run = resolved(told), labelled(told)
    assert "Advantages   in prompts" in describe(run) and "53% of the training frames positive" in describe(run)
    assert run.rows.identity != plain.rows.identity
    prepare = make_prepare(run.policy, run.rows)
    (rows,) = run.rows.in_stored_order().read_rows([0, 1], 2)
    tokens = prepare(rows)["observation.language.tokens"]
    assert not np.array_equal(tokens[0], tokens[1])  # frames of one episode, whose labels differ
    same = make_prepare(plain.policy, plain.rows)(rows)["observation.language.tokens"]
    assert same.shape == tokens.shape and not np.array_equal(same[0], tokens[0])


def test_an_advantage_that_was_recorded_is_not_said_twice(tmp_path):
    """Episodes of a robot that was told one, beside others: prompts and the robot's file are as of plain texts."""
    recorded = (f"{TEXTS[0]}, Advantage: positive", f"{TEXTS[1]}{ADVANTAGE[True]}{ADVANTAGE[False]}", TEXTS[0])
    runs = []
    for name, tasks in (("plain", (*TEXTS, TEXTS[0])), ("recorded", recorded)):
        setting = setting_of(tmp_path / name, tasks=tasks)
        runs.append((labelled(setting), resolved(setting)))
    (plain, _), (run, unlabelled) = runs
    rows = [made.rows.in_stored_order().read_rows(list(range(15)), 15) for made in (plain, run)]
    tokens = [
        make_prepare(made.policy, made.rows)(block)["observation.language.tokens"]
        for made, (block,) in zip((plain, run), rows, strict=True)
    ]
    np.testing.assert_array_equal(*tokens)
    assert "not read: the advantage that 2 of 3 tasks end with, as 'go to the red bin, Advantage" in describe(run)
    facts = run.robots[0].files["robot.json"]
    assert facts["instructions"] == sorted(TEXTS) and facts["instructions_end_with"] == ADVANTAGE[True]
    (meta,) = unlabelled.rows.metas  # without labels of its own, a run trains on the texts as they are
    assert set(meta.tasks.values()) == set(recorded) and "not read" not in describe(unlabelled)
    shown, *_ = show_labels(setting[0] / "labels.parquet", meta)
    assert [line.split("  ")[-1] for line in shown[2:]] == list(TEXTS)


def test_lerobot_alone_says_to_the_policy_what_it_was_trained_with(told, tmp_path):
    """The exported policy in LeRobot's hands, its label in the task's text: the same tokens as in training."""
    run = labelled(told)
    own, folder = run.policy, tmp_path / "exported"
    save_pretrained(own.start(), *own.processors(), folder)
    policy = TinyPI05Policy.from_pretrained(folder)
    preprocess, postprocess = make_pre_post_processors(policy.config, pretrained_path=str(folder))

    dataset = LeRobotDataset("x/tried", told[1], video_backend="pyav")
    for frame, label in enumerate(("positive", "negative")):
        (rows,) = run.rows.in_stored_order().read_rows([frame], 1)
        trained = make_prepare(own, run.rows)(rows)["observation.language.tokens"]
        item = dataset[frame]
        seen = {key: item[key] for key in ("observation.images.top", "observation.state")}
        found = preprocess({**seen, "task": f"{item['task']}, Advantage: {label}"})
        tokens = found["observation.language.tokens"][:, : trained.shape[1]]
        np.testing.assert_array_equal(tokens.numpy(), trained)
        assert postprocess(policy.predict_action_chunk(found)).shape == (1, policy.config.chunk_size, 3)
