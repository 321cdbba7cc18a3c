"""Success and interventions of episodes, from columns and files."""

import inspect
import json
from dataclasses import replace

import lerobot.rollout.context as rollout_context
import numpy as np
import pytest
from lerobot.teleoperators.utils import TeleopEvents

from tests.datasets import edit_rows, make_dataset
from vla_finetuning.data.metadata import load_metadata, rename_features
from vla_finetuning.options.recap import OutcomeOptions
from vla_finetuning.plan.outcomes import corrected_frames, episode_success, intervention_columns

EPISODES = (4, 3, 5)
ALL = np.arange(3)


@pytest.fixture(scope="module")
def meta(tmp_path_factory):
    """Rewards of episode 1 reach 1 in the middle, those of the others stay below; the last two frames are done."""
    root = make_dataset(
        tmp_path_factory.mktemp("outcomes") / "data", episodes=EPISODES, cameras={}, extra_features=True
    )

    def change(reward, episode, frame):
        reward[:] = np.where((episode == 1) & (frame == 1), 1.0, 0.4).reshape(reward.shape)

    edit_rows(root, "next.reward", change)
    return load_metadata(root)


def test_success_column_is_compared_with_threshold(meta):
    (succeeded,) = episode_success(OutcomeOptions(success="next.reward"), [meta], [ALL], ["a"])
    assert succeeded.tolist() == [False, True, False]
    (succeeded,) = episode_success(OutcomeOptions(success="next.reward", threshold=0.3), [meta], [ALL], ["a"])
    assert succeeded.all()
    (succeeded,) = episode_success(OutcomeOptions(success="next.done"), [meta], [ALL], ["a"])
    assert succeeded.all()  # true counts as 1


def test_outcomes_of_unchosen_episodes_are_not_read(meta, tmp_path, monkeypatch):
    path, chosen = tmp_path / "outcomes.json", [np.array([1])]
    path.write_text(json.dumps({"1": 1, "2": 1}))
    for success in ("next.reward", f"@{path}"):
        (actual,) = episode_success(OutcomeOptions(success=success), [meta], chosen, ["a"])
        assert actual.tolist() == [False, True, False]
    absent = replace(meta, episode_length=np.array([0, 3, 0]))
    (actual,) = episode_success(OutcomeOptions(success="next.reward"), [absent], chosen, ["a"])
    assert actual.tolist() == [False, True, False]
    (actual,) = corrected_frames(OutcomeOptions(intervention="next.done"), [meta], chosen)
    assert np.flatnonzero(actual).tolist() == [6]


def test_corrected_frames_come_from_intervention_column(meta):
    (corrected,) = corrected_frames(OutcomeOptions(intervention="next.done"), [meta], [ALL])
    assert np.flatnonzero(corrected).tolist() == [3, 6, 11]
    (corrected,) = corrected_frames(OutcomeOptions(), [meta], [ALL])
    assert not corrected.any() and len(corrected) == sum(EPISODES)
    with pytest.raises(ValueError, match="--outcome.intervention=is_interventoin: no dataset has that column"):
        corrected_frames(OutcomeOptions(intervention="is_interventoin"), [meta], [ALL])


def test_lerobot_intervention_columns_are_recognized(meta):
    names = ("intervention", TeleopEvents.IS_INTERVENTION.value)
    assert f'dataset_features["{names[0]}"]' in inspect.getsource(rollout_context)
    metas = [rename_features(meta, {"next.done": name}) for name in names]
    corrected = corrected_frames(OutcomeOptions(), [*metas, meta], [ALL] * 3)
    assert [np.flatnonzero(frames).tolist() for frames in corrected] == [[3, 6, 11], [3, 6, 11], []]
    assert intervention_columns(OutcomeOptions(), [*metas, meta]) == (*names, None)
    both = rename_features(metas[0], {"next.reward": names[1]})
    with pytest.raises(ValueError, match="has the columns intervention and is_intervention: say which"):
        corrected_frames(OutcomeOptions(), [both], [ALL])
    assert corrected_frames(OutcomeOptions(intervention=names[0]), [both], [ALL])[0].sum() == 3


def test_outcome_file_by_dataset_root(meta, tmp_path):
    path = tmp_path / "outcomes.json"
    path.write_text(json.dumps({"a": {"0": True, "1": 0, "2": False}, "b": {"0": 0, "1": 0, "2": 1}}))
    succeeded = episode_success(OutcomeOptions(success=f"@{path}"), [meta, meta], [ALL, ALL], ["a", "b"])
    assert [of.tolist() for of in succeeded] == [[True, False, False], [False, False, True]]
    path = tmp_path / "outcomes.csv"
    path.write_text("episode_index,success\n2,true\n0,true\n1,false\n")
    (succeeded,) = episode_success(OutcomeOptions(success=f"@{path}"), [meta], [ALL], ["a"])
    assert succeeded.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("success", "message"),
    [
        ("next.sucess", "next.sucess.*its columns are .*next.reward"),
        ("observation.state", "expected one number"),
        ("@{tmp}/none.json", "no such file.*--outcome.success=@FILE takes"),
        ("@{tmp}/part.json", "does not say whether episode 2 of a succeeded"),
        ("@{tmp}/blank.csv", "the success of episode 1 is nan or an empty cell"),
    ],
)
def test_unreadable_outcomes_are_refused(meta, tmp_path, success, message):
    (tmp_path / "part.json").write_text(json.dumps({"0": 1, "1": 0}))
    (tmp_path / "blank.csv").write_text("episode_index,success\n0,1\n1,\n2,1\n")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        episode_success(OutcomeOptions(success=success.format(tmp=tmp_path)), [meta], [ALL], ["a"])
    text = replace(meta, features={**meta.features, "text": replace(meta.features["next.done"], dtype="string")})
    with pytest.raises(ValueError, match="text is string .*expected one number"):
        episode_success(OutcomeOptions(success="text"), [text], [ALL], ["a"])
