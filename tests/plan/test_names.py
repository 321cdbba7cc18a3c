"""Renamed and joined features against the same dataset with LeRobot's names."""

import json
import re
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diagnostics.show_dataset import main as show_dataset
from lerobot_datasource import LeRobotDatasource
from tests.datasets import make_dataset
from tests.in_process import resolved
from tests.tiny import make_base
from vla_finetuning.data.frames import movement_keys
from vla_finetuning.data.idle import moving_runs
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.data.quantiles import Source, exact_stats, sample_rows
from vla_finetuning.data.statistics import STATISTICS, complete_stats, digest, episode_arrays, files_of
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.plan.datasets import find_datasets
from vla_finetuning.plan.names import proposed_names, with_names
from vla_finetuning.plan.record import record_run
from vla_finetuning.report.page import look_at_datasets

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
        for name, stored in names.items():
            renamed[stored] = renamed.pop(name)
        path.write_text(json.dumps(content))
    for path in [*root.glob("data/*/*.parquet"), *root.glob("meta/episodes/*/*.parquet")]:
        table = pq.read_table(path)
        columns = [names.get(column, column) for column in table.column_names]
        for name, stored in names.items():
            columns = [column.replace(f"/{name}/", f"/{stored}/") for column in columns]
        pq.write_table(table.rename_columns(columns), path)
    for name, stored in names.items():
        if (root / "videos" / name).exists():
            (root / "videos" / name).rename(root / "videos" / stored)
    return root


def split_state(root, parts, key="observation.state"):
    """Store a vector of a v3.0 dataset as several features, each with the given entries."""
    for path in (root / "meta/info.json", root / "meta/stats.json"):
        content = json.loads(path.read_text())
        features = content.get("features", content)
        state = features.pop(key)
        for name, entries in parts.items():
            if "shape" in state:
                names = [state["names"][i] for i in entries]
                features[name] = {"dtype": "float32", "shape": [len(entries)], "names": names}
            else:
                features[name] = {n: v if n == "count" else [v[i] for i in entries] for n, v in state.items()}
        path.write_text(json.dumps(content))
    for path in root.glob("data/*/*.parquet"):
        table = pq.read_table(path)
        state = np.stack(table[key].to_numpy()).astype(np.float32)
        table = table.drop_columns([key])
        for name, entries in parts.items():
            lists = state[:, entries]
            column = pa.array(lists[:, 0] if len(entries) == 1 else list(lists))
            table = table.append_column(name, column)
        pq.write_table(table, path)
    return root


# As in openpi's DROID; the order in the files is another one.
DROID = {"gripper_position": [3], "joint_position": [0, 1, 2]}
JOINED = {"dataset.state_features": "joint_position,gripper_position"}


@pytest.fixture(scope="module")
def split(settings):
    folder, root, base = settings[0][0].parent / "c", settings[0][0].parent / "split", settings[0][2]
    make_dataset(root, episodes=(6, 5, 4), cameras=CAMERAS)
    return folder, split_state(root, DROID), base


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Return settings of the same dataset with LeRobot's names and with others."""
    folder = tmp_path_factory.mktemp("names")
    plain, renamed = (make_dataset(folder / name, episodes=(6, 5, 4), cameras=CAMERAS) for name in ("plain", "own"))
    rename_files(renamed, OWN)
    base = make_base(folder / "base", load_metadata(plain), width=32, depth=2, mlp_dim=32, head_dim=8)
    return (folder / "a", plain, base), (folder / "b", renamed, base)


def assert_same_rows(run, other):
    (expected,), (actual,) = (of.rows.source().read_rows(range(15), 15) for of in (run, other))
    assert actual.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_array_equal(actual[key], values)


def assert_same_statistics(run, other):
    (expected,), (actual,) = run.robots, other.robots
    assert actual.missing_stats == expected.missing_stats and actual.stats.keys() == expected.stats.keys()
    for key, values in expected.stats.items():
        for name, value in values.items():
            np.testing.assert_array_equal(actual.stats[key][name], value, err_msg=f"{key} {name}")


def test_rename_map_yields_same_rows_and_statistics(settings):
    stored = {"dataset.statistics": "stored"}
    plain, renamed = (
        resolved(setting, **stored, **more) for setting, more in zip(settings, ({}, {"rename_map": MAP}), strict=True)
    )
    assert_same_rows(plain, renamed)
    assert renamed.robots[0].rename_map == {}
    assert_same_statistics(plain, renamed)
    assert renamed.config.rename_map == json.loads(MAP), "what a resumed run is started with"


def test_renamed_cameras_are_fetched_from_hub_by_stored_name(settings, monkeypatch):
    fetch = Mock(return_value=(str(settings[1][1]), "c0ffee"))
    monkeypatch.setattr("vla_finetuning.plan.datasets.fetch_dataset", fetch)
    flags = ["--dataset.repo_id=a/b", f"--rename_map={MAP}", "--policy.path=p", "--output_dir=o"]
    _, datasets = find_datasets(parse_args([*flags, "--dataset.camera_keys=observation.images.base_0_rgb"]))
    assert fetch.call_args.kwargs["camera_keys"] == ["image"]
    assert datasets.members[0].camera_keys == ["observation.images.base_0_rgb"]


def test_well_known_feature_names_are_proposed(settings):
    with pytest.raises(ValueError, match="no feature is called action or observation") as refused:
        resolved(settings[1])
    flag = re.search(r"--rename_map '(.*)' gives them LeRobot's names", str(refused.value))[1]
    assert json.loads(flag) == json.loads(MAP)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"stat": "observation.state"}, r'"stat": "observation.state", and .*did you mean state\?'),
        ({"state": "action", "actions": "action"}, "no feature is called observation"),
        ({"index": "row"}, "LeRobot's own columns .* keep their names"),
        ({"observation.image": "observation.images.top"}, '"observation.images.top", and the datasets'),
    ],
)
def test_invalid_rename_map_is_refused(settings, names, message):
    with pytest.raises(ValueError, match=message):
        resolved(settings[1], rename_map=json.dumps({**json.loads(MAP), **names} if len(names) == 1 else names))


def test_show_dataset_takes_rename_map(settings, tmp_path, capsys):
    root, page = str(settings[1][1]), tmp_path / "page.html"
    names = json.dumps({**json.loads(MAP), "state": "observation.joints"})
    assert show_dataset([root, "--rename_map", names, "--output", str(page)]) == 0
    assert "action: of the values" in capsys.readouterr().out
    assert all(name in page.read_text() for name in ("observation.images.left_w", "n.joints"))
    assert show_dataset([root, "--rename_map", '{"stat": "a"}', "--output", str(page)]) == 2
    assert "did you mean state?" in capsys.readouterr().err


def test_report_reads_renamed_and_joined_features(settings, split, tmp_path):
    for setting, names in ((settings[1], {"rename_map": MAP}), (split, JOINED)):
        run = resolved(setting, output_dir=tmp_path, **names)
        record_run(run.job, run.policy, "", {}, run.rows)
        (drawn,) = look_at_datasets(tmp_path)
        assert drawn["look"].ranges.keys() == {"observation.state", "action"}


def test_joined_state_yields_same_rows_and_statistics(settings, split):
    more = {"dataset.statistics": "lerobot"}
    plain, joined = resolved(settings[0], **more), resolved(split, **more, **JOINED)
    assert_same_rows(plain, joined)
    assert_same_statistics(plain, joined)
    assert joined.rows.metas[0].features["observation.state"].names == ("joint_0", "joint_1", "joint_2", "joint_3")


def test_joined_action_follows_order_of_rename_map(tmp_path):
    root = make_dataset(tmp_path / "d", episodes=(4,), cameras={})
    stored = np.stack(pq.read_table(next(root.glob("data/*/*.parquet")))["action"].to_numpy())
    split_state(root, {"hand_cmd": [2], "arm_cmd": [0, 1]}, "action")
    entries = {name: {"original_key": f"{name}_cmd"} for name in ("arm", "hand")}
    (root / "meta/modality.json").write_text(json.dumps({"action": entries}))
    with pytest.raises(ValueError, match=r"the action is then arm_cmd \(2\), hand_cmd \(1\), in the map") as refused:
        with_names([load_metadata(root)], {})
    proposed = json.loads(re.search(r"--rename_map '(.*)' gives them", str(refused.value))[1])
    assert proposed == {"arm_cmd": "action", "hand_cmd": "action"}

    def actions(meta):
        (rows,) = LeRobotDatasource([meta]).read_rows(range(4), 4)
        return rows["action"]

    np.testing.assert_array_equal(actions(with_names([load_metadata(root)], proposed)[0]), stored)
    root_e = make_dataset(tmp_path / "e", episodes=(4,), cameras={})
    split = split_state(root_e, {"action": [0, 1], "grip": [2]}, "action")
    (meta,) = with_names([load_metadata(split)], {"grip": "action", "action": "action"})
    np.testing.assert_array_equal(actions(meta), stored[:, [2, 0, 1]])
    assert with_names([load_metadata(root)], {"arm_cmd": "action"})[0].features["action"].shape == (2,)
    mixture = {str(root): {"rename_map": {"hand_cmd": "action", "arm_cmd": "action"}}}
    flags = [f"--dataset.mixture={json.dumps(mixture)}", f"--rename_map={json.dumps(proposed)}"]
    _, datasets = find_datasets(parse_args([*flags, "--policy.path=x", "--output_dir=y"]))
    np.testing.assert_array_equal(actions(datasets.metas[0]), stored[:, [2, 0, 1]])


def test_joined_state_reads_equal_for_every_reader(settings, split):
    plain = load_metadata(settings[0][1])
    (joined,) = with_names([load_metadata(split[1])], {}, ["joint_position", "gripper_position"])
    key, everything = "observation.state", plain.episode_index

    def read(meta):
        exact, _ = exact_stats([Source(meta, everything, 1.0)], [key], cache_dir=None)
        as_lerobot = complete_stats(
            replace(meta, stats={}), {key: set(STATISTICS)}, cache_dir=None, episodes=everything
        )
        assert exact[key].keys() == as_lerobot[key].keys() == set(STATISTICS)
        yield from (exact[key][name] for name in STATISTICS)
        yield from (as_lerobot[key][name] for name in STATISTICS)
        yield sample_rows(meta, everything, [key])[0][key]
        yield moving_runs(meta, everything, movement_keys(meta), 0.3)
        for file in files_of(meta, everything):
            yield from (arrays[key] for _, arrays in episode_arrays(meta.fs, features=[meta.features[key]], **file))

    for expected, actual in zip(read(plain), read(joined), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_order_of_state_features_changes_statistics_digest(split):
    gripper_first, joints_first = (
        with_names([load_metadata(split[1])], {}, keys)[0]
        for keys in (list(DROID), ["joint_position", "gripper_position"])
    )
    assert gripper_first.features["observation.state"].names == ("joint_3", "joint_0", "joint_1", "joint_2")
    assert len({digest(meta, ["observation.state"], meta.episode_index) for meta in (gripper_first, joints_first)}) == 2
    np.testing.assert_array_equal(
        gripper_first.stats["observation.state"]["mean"], joints_first.stats["observation.state"]["mean"][[3, 0, 1, 2]]
    )


def test_mixture_joins_only_members_with_split_state(settings, split):
    both = {"dataset.root": f"{settings[0][1]},{split[1]}", "dataset.statistics": "exact"}
    mixed = resolved(split, **both, **JOINED)
    plain, joined = (meta.features["observation.state"] for meta in mixed.rows.metas)
    assert not plain.joined and len(joined.joined) == 2
    (rows,) = mixed.rows.source().read_rows(range(30), 30)
    episode, frame, state = (rows[key] for key in ("episode_index", "frame_index", "observation.state"))
    order = np.lexsort((frame, episode))  # the two datasets' rows side by side
    np.testing.assert_array_equal(state[order[::2]], state[order[1::2]])
    assert len(np.unique(state, axis=0)) == 15


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("joint_positon,gripper_position", "no feature 'joint_positon' to join into 'observation.state'; it has .*"),
        ("joint_positon", "did you mean joint_position?"),
        ("joint_position,joint_position", "joined twice"),
        ("joint_position,timestamp", "'timestamp' cannot be joined"),
        ("joint_position,observation.images.base_0_rgb", "cannot be joined .* no vector"),
    ],
)
def test_invalid_state_features_are_refused(split, keys, message):
    with pytest.raises(ValueError, match=message):
        resolved(split, **{"dataset.state_features": keys})


def test_joining_beside_existing_state_is_refused(tmp_path):
    root = make_dataset(tmp_path / "both", episodes=(2,), cameras={}, extra_features=True)
    meta = load_metadata(root)
    with pytest.raises(ValueError, match="has a feature 'observation.state' beside observation.counter; name it"):
        with_names([meta], {}, ["observation.counter"])
    (joined,) = with_names([meta], {}, ["observation.state", "observation.counter"])
    assert joined.features["observation.state"].shape == (6,)


def test_split_state_and_action_are_proposed(tmp_path):
    """As in openpi's DROID and AgiBot."""
    root = split_state(make_dataset(tmp_path / "droid", episodes=(2,), cameras={}), DROID)
    actions = {"action.gripper": [2], "action.arm": [0, 1]}
    meta = load_metadata(split_state(root, actions, "action"))
    assert proposed_names(meta) == (dict.fromkeys(actions, "action"), ["joint_position", "gripper_position"])


def test_features_in_gr00t_modality_json_are_proposed(tmp_path):
    root = make_dataset(tmp_path / "gr00t", episodes=(2,), cameras={"observation.images.base_0_rgb": (48, 64)})
    split_state(root, {"arm": [0, 1], "hand": [2, 3]})
    rename_files(root, {"action": "command", "observation.images.base_0_rgb": "ego"})
    modality = {
        "state": {
            "left_arm": {"original_key": "arm", "start": 0, "end": 1},
            "right_arm": {"original_key": "arm", "start": 1, "end": 2},
            "hand": {"original_key": "hand", "start": 0, "end": 2},
        },
        "action": {"arms": {"original_key": "command", "start": 0, "end": 3}},
        "video": {"ego_view": {"original_key": "ego"}, "gone": {}},
    }
    path = root / "meta/modality.json"
    path.write_text(json.dumps(modality))
    with pytest.raises(ValueError, match="state_features arm,hand gives") as refused:
        with_names([load_metadata(root)], {})
    flag = re.search(r"--rename_map '(.*)' --dataset", str(refused.value))[1]
    assert json.loads(flag) == {"command": "action", "ego": "observation.images.ego_view"}
    path.write_text(json.dumps({"state": {"arm": 3}}))
    with pytest.raises(ValueError, match="modality.json: state is .* expected an object of objects"):
        with_names([load_metadata(root)], {})


def test_unknown_camera_name_is_proposed_unchanged(settings, tmp_path):
    root = make_dataset(tmp_path / "odd", episodes=(2,), cameras=CAMERAS)
    meta = load_metadata(rename_files(root, {"observation.images.base_0_rgb": "cams.overhead"}))
    assert proposed_names(meta) == ({"cams.overhead": "observation.images.overhead"}, [])
