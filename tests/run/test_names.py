"""A dataset whose features have other names than LeRobot's trains as if it had those."""

import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest

from diagnostics.show_dataset import main as show_dataset
from tests.datasets import make_dataset
from tests.in_process import resolved, train
from tests.tiny import make_base
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.run.preflight import proposed_names, with_names

# As openpi's LIBERO example calls them.
OWN = {
    "observation.state": "state",
    "action": "actions",
    "observation.images.base_0_rgb": "image",
    "observation.images.left_wrist_0_rgb": "wrist_image",
}
MAP = json.dumps({own: name for name, own in OWN.items()})
CAMERAS = {"observation.images.base_0_rgb": (48, 64), "observation.images.left_wrist_0_rgb": (48, 64)}


def rename_files(root, names):
    """Give the features of a v3.0 dataset other names, in all files that hold them."""
    for path in (root / "meta/info.json", root / "meta/stats.json"):
        content = json.loads(path.read_text())
        renamed = content.get("features", content)
        for name, own in names.items():
            renamed[own] = renamed.pop(name)
        path.write_text(json.dumps(content))
    for path in [*root.glob("data/*/*.parquet"), *root.glob("meta/episodes/*/*.parquet")]:
        table = pq.read_table(path)
        columns = [names.get(column, column) for column in table.column_names]
        for name, own in names.items():
            columns = [column.replace(f"/{name}/", f"/{own}/") for column in columns]
        pq.write_table(table.rename_columns(columns), path)
    for name, own in names.items():
        if (root / "videos" / name).exists():
            (root / "videos" / name).rename(root / "videos" / own)
    return root


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """The same dataset with LeRobot's names and with its own, and a base policy for it."""
    folder = tmp_path_factory.mktemp("names")
    plain, own = (make_dataset(folder / name, episodes=(6, 5, 4), cameras=CAMERAS) for name in ("plain", "own"))
    rename_files(own, OWN)
    base = make_base(folder / "base", load_metadata(plain), width=32, depth=2, mlp_dim=32, head_dim=8)
    return (folder / "a", plain, base), (folder / "b", own, base)


@pytest.mark.parametrize("statistics", ["stored", "exact"])
def test_rows_statistics_and_processors_are_those_of_lerobots_names(settings, statistics):
    plain, own = (
        resolved(setting, **{"dataset.statistics": statistics, **more})
        for setting, more in zip(settings, ({}, {"rename_map": MAP}), strict=True)
    )
    (expected,), (found,) = (run.rows.source().read_rows(range(15), 15) for run in (plain, own))
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_array_equal(found[key], values)
    assert own.missing_stats == plain.missing_stats and own.policy.rename_map == {}
    if statistics == "stored":
        assert own.policy.stats.keys() == plain.policy.stats.keys()
        for key, values in plain.policy.stats.items():
            for name, value in values.items():
                np.testing.assert_array_equal(own.policy.stats[key][name], value)
    assert json.loads(json.dumps(own.config.rename_map)) == json.loads(MAP), "what a resumed run is started with"


def test_losses_are_those_of_lerobots_names(settings):
    def losses(setting, **more):
        run = resolved(setting, steps=3, **{"dataset.statistics": "stored"}, **more)
        run.job.output_dir.mkdir(parents=True, exist_ok=True)
        train(run)
        return [json.loads(line)["loss"] for line in (run.job.output_dir / "metrics.jsonl").read_text().splitlines()]

    assert losses(settings[1], rename_map=MAP) == losses(settings[0])


def test_names_that_are_well_known_are_proposed_and_work(settings):
    _, own = settings
    with pytest.raises(ValueError, match="no feature is called action or observation") as refused:
        resolved(own)
    flag = re.search(r"--rename_map '(.*)' gives them LeRobot's names", str(refused.value))[1]
    assert json.loads(flag) == json.loads(MAP)
    assert resolved(own, rename_map=flag).match.dataset_keys


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"stat": "observation.state"}, r'"stat": "observation.state", and .*did you mean state\?'),
        ({"state": "action", "actions": "action"}, "would all be called 'action'"),
        ({"index": "row"}, "LeRobot's own columns .* keep their names"),
    ],
)
def test_names_that_do_not_fit_are_refused(settings, names, message):
    with pytest.raises(ValueError, match=message):
        resolved(settings[1], rename_map=json.dumps({**json.loads(MAP), **names} if len(names) == 1 else names))


def test_the_look_at_a_dataset_takes_names_too(settings, tmp_path, capsys):
    root = settings[1][1]
    assert show_dataset([str(root), "--rename_map", MAP, "--output", str(tmp_path / "page.html")]) == 0
    assert "action: of the values" in capsys.readouterr().out
    assert "observation.images.left_wrist_0_rgb" in (tmp_path / "page.html").read_text()


def test_the_look_renames_observations_too_and_refuses_names_that_are_not_there(settings, tmp_path, capsys):
    root, page = settings[0][1], tmp_path / "page.html"
    names = {"observation.state": "observation.joints"}
    assert show_dataset([str(root), "--rename_map", json.dumps(names), "--output", str(page)]) == 0
    assert "observation.joints" in page.read_text()
    assert show_dataset([str(root), "--rename_map", '{"observation.stat": "a"}', "--output", str(page)]) == 2
    assert "did you mean observation.state?" in capsys.readouterr().err


def test_a_state_in_two_features_is_said(tmp_path):
    """As in openpi's DROID."""
    root = make_dataset(tmp_path / "droid", episodes=(2,), cameras={}, extra_features=True)
    rename_files(root, {"observation.state": "joint_position", "observation.counter": "gripper_position"})
    with pytest.raises(ValueError, match="joint_position is the state then, without gripper_position: join the two"):
        with_names([load_metadata(rename_files(root, {"action": "actions"}))], {})


def test_cameras_that_nobody_knows_keep_their_own_name(settings, tmp_path):
    root = make_dataset(tmp_path / "odd", episodes=(2,), cameras=CAMERAS)
    meta = load_metadata(rename_files(root, {"observation.images.base_0_rgb": "cams.overhead"}))
    assert proposed_names(meta) == {"cams.overhead": "observation.images.overhead"}
