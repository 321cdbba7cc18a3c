"""The demo dataset as LeRobot reads it, and the demo's base policy."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from lerobot.configs import PreTrainedConfig
from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.factory import get_policy_class, make_pre_post_processors

from tests.datasets import make_dataset
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.envs.two_bins_scene import FPS, INSTRUCTIONS
from vla_finetuning.files import atomic_folder
from vla_finetuning.plan import demo
from vla_finetuning.plan.demo import demo_scenes, make_demo_dataset, prepare_base, prepare_dataset

CHUNK_SIZE = 10  # of the demo's policy: one second of actions


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Return (root, base, cache) of a demo with fewer episodes."""
    cache = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "DEMO_PAIRS", 9)
        patch.setattr(demo, "VIDEO_FILE_MB", demo.VIDEO_FILE_MB / 4)
        patch.setattr(demo, "DATA_FILE_MB", demo.DATA_FILE_MB / 4)
        root = prepare_dataset(cache)
    return root, base_for(cache, root), cache


def base_for(cache, root):
    meta = load_metadata(root)
    return prepare_base(cache, features=meta.features, tasks=sorted(meta.tasks.values()), fps=meta.fps)


@pytest.fixture(scope="module")
def metadata(prepared):
    return LeRobotDatasetMetadata("demo/demo", root=prepared[0])


@pytest.fixture(scope="module")
def dataset(prepared):
    windows = {"action": [i / FPS for i in range(CHUNK_SIZE)]}
    return LeRobotDataset(
        "demo/demo", root=prepared[0], video_backend="pyav", return_uint8=True, delta_timestamps=windows
    )


def test_demo_dataset_has_varied_cameras_and_lengths(metadata):
    sizes = {key: tuple(metadata.features[key]["shape"]) for key in metadata.video_keys}
    assert len(sizes) == 3 and len(set(sizes.values())) > 1
    for key in sizes:
        assert metadata.features[key]["info"]["video.codec"] == "av1"
        assert metadata.features[key]["info"]["video.g"] == 2
    assert metadata.fps == FPS and metadata.robot_type and metadata.total_tasks == 2
    assert metadata.names["action"] == ["x_cm", "y_cm", "z_cm"]
    lengths = list(metadata.episodes["length"])
    assert len(set(lengths)) > 5 and sum(lengths) == metadata.total_frames
    assert min(lengths) < CHUNK_SIZE


def test_data_and_video_files_roll_over_at_different_episodes(metadata):
    episodes = metadata.episodes
    starts = {}
    for key in ("data", *(f"videos/{key}" for key in metadata.video_keys)):
        files = list(zip(episodes[f"{key}/chunk_index"], episodes[f"{key}/file_index"], strict=True))
        assert len(set(files)) > 1, f"{key} has one file only"
        starts[key] = tuple(i for i in range(1, len(files)) if files[i] != files[i - 1])
    assert len(set(starts.values())) > 2, starts


def test_parquet_files_depend_only_on_seed(tmp_path):
    a, b = (make_demo_dataset(tmp_path / name, pairs=2, seed=1) for name in "ab")
    files = [path.relative_to(a) for path in (a / "meta/tasks.parquet", *(a / "data").rglob("*.parquet"))]
    assert len(files) >= 2 and all((a / file).read_bytes() == (b / file).read_bytes() for file in files)
    assert demo_scenes(3, seed=1) != demo_scenes(3, seed=2)


def test_base_policy_predicts_from_demo_rows(prepared, dataset):
    _, base, _ = prepared
    config = PreTrainedConfig.from_pretrained(base)
    policy = get_policy_class(config.type).from_pretrained(base, config=config)
    preprocessor, postprocessor = make_pre_post_processors(config, pretrained_path=str(base))
    assert config.chunk_size == CHUNK_SIZE
    row = dataset[0]
    batch = {key: (row[key] / 255)[None] for key in config.image_features}
    batch |= {"observation.state": row["observation.state"][None], "task": [row["task"]]}
    prepared_batch = preprocessor(batch)
    assert postprocessor(policy.predict_action_chunk(prepared_batch)).shape == (1, CHUNK_SIZE, 3)
    steps = {getattr(step, "_registry_name", ""): step for step in preprocessor.steps}
    tokenizer = steps["tiny_pi05_tokenizer_processor"].input_tokenizer
    assert not (prepared_batch["observation.language.tokens"] == tokenizer.unk_token_id).any()


def test_cached_demo_is_reused(prepared, monkeypatch):
    root, base, cache = prepared
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    monkeypatch.setattr(demo, "writing_videos", None)  # called only to write
    monkeypatch.setattr("vla_finetuning.policies.tiny.make_tiny_base", None)
    assert prepare_dataset(cache) == root and base_for(cache, root) == base
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


def test_base_for_user_dataset_is_separate(prepared, tmp_path):
    base = base_for(prepared[2], make_dataset(tmp_path / "own", fps=5))
    assert base != prepared[1] and PreTrainedConfig.from_pretrained(base).chunk_size == 5


ENCODE = """
import os, sys
import av, numpy as np
from vla_finetuning.envs.writing import writing_videos

os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # whatever started this process

def encode():
    with av.open(sys.argv[1], "w") as container:
        stream = container.add_stream("libsvtav1", rate=30, options={"svtav1-params": "lp=1"})
        stream.height, stream.width, stream.pix_fmt = 64, 64, "yuv420p"
        for i in range(3):
            frame = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
            frame.pts = i
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))

def policies():
    threads = set()
    for thread in os.listdir("/proc/self/task"):
        try:
            threads.add(os.sched_getscheduler(int(thread)))
        except ProcessLookupError:  # one of the encoder's, that has ended since
            pass
    return threads

with writing_videos():
    encode()
print(sorted(policies()))
encode()
print(os.SCHED_FIFO in policies())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux") or os.geteuid() != 0, reason="only root has this on Linux")
def test_video_encoder_leaves_no_real_time_threads(tmp_path):
    """A Ray cluster that inherits real-time threads can hang; the control makes some."""
    root = Path(demo.__file__).parents[2]
    command = [sys.executable, "-c", ENCODE, str(tmp_path / "video.mp4")]
    completed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=600)
    assert completed.stdout.splitlines()[-2:] == [str([os.SCHED_OTHER]), "True"]


def test_disobedient_share_changes_actions_not_instructions(tmp_path):
    wrong = demo.disobeyed(3, 0.3)
    assert wrong.sum() == round(6 * 0.3)
    rows = LeRobotDataset("demo/demo", root=make_demo_dataset(tmp_path / "disobedient", pairs=3, disobedient=0.3))
    assert [tasks[0] for tasks in rows.meta.episodes["tasks"]] == list(INSTRUCTIONS.values()) * 3
    actions = rows.hf_dataset.with_format("numpy")
    colours = list(INSTRUCTIONS)
    for episode, end in enumerate(rows.meta.episodes["dataset_to_index"]):
        place = demo_scenes(3)[episode // 2].place(colours[(episode + wrong[episode]) % 2])
        np.testing.assert_allclose(actions[end - 1]["action"], place, atol=1e-4)


def test_atomic_folder_appears_complete_or_not_at_all(tmp_path):
    folder = tmp_path / "deep" / "folder"
    with pytest.raises(RuntimeError), atomic_folder(folder) as partial:
        partial.mkdir()
        (partial / "half").write_text("x")
        assert not folder.exists()
        raise RuntimeError
    assert list(folder.parent.iterdir()) == []


def test_atomic_folder_keeps_first_of_two_writers(tmp_path):
    folder = tmp_path / "folder"
    with atomic_folder(folder) as late:
        late.mkdir()
        (late / "late").write_text("x")
        with atomic_folder(folder) as early:
            early.mkdir()
            (early / "early").write_text("x")
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "early"]
