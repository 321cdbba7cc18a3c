"""Missing files and broken episodes: the proposed flags let the run go on."""

import json
import re
import shlex
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import in_process
from tests.datasets import make_dataset
from tests.tiny import make_base
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.plan.describe import describe
from vla_finetuning.plan.preflight import examine
from vla_finetuning.plan.resolve import resolve

TOP, WRIST = "observation.images.top", "observation.images.wrist"


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("holes")
    root = make_dataset(folder / "dataset")
    return folder, root, make_base(folder / "base", load_metadata(root), chunk_size=8)


@pytest.fixture
def root(setting, tmp_path):
    """A dataset without a data file and a video; `lost` are the episodes that need them."""
    root = shutil.copytree(setting[1], tmp_path / "holes")
    meta = load_metadata(root)
    (root / meta.data_files[1]).unlink()
    (root / meta.video_files[WRIST][0]).unlink()
    return root


def lost(meta):
    return np.flatnonzero((meta.episode_data_file == 1) | (meta.episode_video_file[WRIST] == 0)).tolist()


def refused(argv, check=None, error=FileNotFoundError):
    """Return the message of the error and the flags that it proposes."""
    with pytest.raises(error) as raised:
        (check or resolved)(argv)
    message = str(raised.value)
    return message, shlex.split("".join(message.partition("--dataset.exclude_episodes=")[1:]))


def checked(argv):
    """Check before heavy imports."""
    return examine(parse_args(argv))


def resolved(argv):
    return resolve(parse_args(argv), gpus_found=0)


def test_proposed_exclude_flag_works_if_files_are_missing(setting, root):
    meta = load_metadata(root)
    argv = in_process.flags(setting, **{"dataset.root": root})
    message, proposed = refused(argv)
    assert meta.data_files[1] in message and meta.video_files[WRIST][0] in message
    assert refused([*argv, "--dataset.skip_idle=0.3"]) == (message, proposed)
    chosen = resolved([*argv, *proposed]).rows.train_episodes[0].tolist()
    assert chosen == sorted(set(range(6)) - set(lost(meta)))
    # What is left out already stays so: a flag that is given twice counts once.
    first = chosen[0]
    _, proposed = refused([*argv, f"--dataset.exclude_episodes={first}"])
    assert resolved([*argv, *proposed]).rows.train_episodes[0].tolist() == chosen[1:]


def test_missing_files_in_mixture_name_each_dataset(setting, root):
    argv = in_process.flags(setting, **{"dataset.root": f"{setting[1]},{root}"})
    _, proposed = refused(argv)
    complete, holes = resolved([*argv, *proposed]).rows.train_episodes
    assert complete.tolist() == list(range(6))
    assert holes.tolist() == sorted(set(range(6)) - set(lost(load_metadata(root))))
    # Where a member says what it leaves out, the flag that would contradict it is not proposed.
    mixture = {str(setting[1]): {"exclude_episodes": [1]}, str(root): 1}
    argv = [a for a in argv if "dataset.root" not in a] + [f"--dataset.mixture={json.dumps(mixture)}"]
    message, proposed = refused(argv)
    assert f"exclude_episodes of {root} in the mixture: " in message and not proposed


def test_on_error_skip_covers_missing_files_up_to_max_skipped(setting, root):
    argv = in_process.flags(setting, **{"dataset.root": root, "dataset.on_error": "skip"})
    assert re.search(r"--dataset.max_skipped=0.01 is less than their \d+% of the frames", refused(argv)[0])
    run = resolved([*argv, "--dataset.max_skipped=0.9"])
    many = len(lost(load_metadata(root)))
    assert run.rows.train_episodes[0].tolist() == list(range(6))
    assert f"the rows of {many} episodes are skipped, by --dataset.on_error" in describe(run)


def test_camera_without_any_file_is_refused_by_name(setting, root):
    shutil.copytree(setting[1] / "data", root / "data", dirs_exist_ok=True)
    shutil.rmtree(root / "videos" / WRIST)
    for more in ({}, {"dataset.on_error": "skip", "dataset.max_skipped": 1}):
        argv = in_process.flags(setting, **{"dataset.root": root}, **more)
        message, _ = refused(argv)
        assert "or cameras whose files are there (--dataset.camera_keys) if only videos are missing" in message
        assert ("is for folders that lack some files" in message) == bool(more)


def test_files_of_unchosen_cameras_are_not_required(setting, tmp_path):
    root = shutil.copytree(setting[1], tmp_path / "one")
    shutil.rmtree(root / "videos" / WRIST)
    mixture = {str(root): {"camera_keys": [TOP]}}
    argv = in_process.flags(setting, **{"dataset.root": None, "dataset.missing_cameras": "mask"})
    assert resolved([*argv, f"--dataset.mixture={json.dumps(mixture)}"]).rows.camera_keys == (TOP,)


@pytest.fixture
def broken(setting, tmp_path):
    """A dataset whose episode 2 has no chunk of a camera's videos, and whose episode 4 is not listed."""
    root = shutil.copytree(setting[1], tmp_path / "broken")
    for path in (root / "meta/episodes").rglob("*.parquet"):
        table = pq.read_table(path)
        table = table.filter(~np.isin(table["episode_index"].to_numpy(), [4]))
        chunks = table[name := f"videos/{WRIST}/chunk_index"].to_pylist()
        numbers = table["episode_index"].to_pylist()
        chunks = pa.array([None if n == 2 else chunk for n, chunk in zip(numbers, chunks, strict=True)], pa.int64())
        pq.write_table(table.set_column(table.column_names.index(name), name, chunks), path)
    return root


def test_broken_episode_metadata_is_refused_only_if_chosen(setting, broken):
    argv = in_process.flags(setting, **{"dataset.root": broken})
    message, proposed = refused(argv, checked, ValueError)
    assert "2 of 6 episodes cannot be read: episode 2 has empty as videos/" in message
    assert proposed == ["--dataset.exclude_episodes=2,4"] == refused(argv, resolved, ValueError)[1]
    checked([*argv, *proposed])
    hand = json.dumps({WRIST: "observation.images.hand"})
    renamed = [*argv, f"--dataset.camera_keys={TOP},{WRIST}", f"--rename_map={hand}"]
    assert refused(renamed, checked, ValueError)[1] == proposed
    assert resolved([*argv, *proposed]).rows.train_episodes[0].tolist() == [0, 1, 3, 5]
    assert resolved([*argv, "--dataset.episodes=0,5"]).rows.train_episodes[0].tolist() == [0, 5]
    _, proposed = refused([*argv, "--dataset.exclude_episodes=0"], checked, ValueError)
    assert proposed == ["--dataset.exclude_episodes=0,2,4"]
    two = in_process.flags(setting, **{"dataset.root": f"{setting[1]},{broken}"})
    _, proposed = refused([*two, f'--dataset.exclude_episodes={{"{setting[1]}": [1]}}'], checked, ValueError)
    first, second = resolved([*two, *proposed]).rows.train_episodes
    assert first.tolist() == [0, 2, 3, 4, 5] and second.tolist() == [0, 1, 3, 5]
    mixture = {str(setting[1]): 1, str(broken): {"exclude_episodes": [2]}}
    with pytest.raises(ValueError, match=f"exclude_episodes of {broken} in the mixture: 2,4"):
        checked([a for a in argv if "dataset.root" not in a] + [f"--dataset.mixture={json.dumps(mixture)}"])
