"""Depth maps as LeRobot gives them, in each way that it stores them."""

import io
import shutil
import sys

import numpy as np
import pytest
from PIL import Image

from tests.data.test_damaged_files import set_row
from tests.data.test_datasource import FPS, lerobot, read_directly
from tests.datasets import datasource
from vla_finetuning.data import decode as lerobot_decode
from vla_finetuning.data.disk_cache import FrameCache
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.envs.writing import writing_videos

DEPTHS = {  # camera: how it is stored, and as what it was recorded
    "observation.images.depth_video": ("video", np.uint16),
    "observation.images.depth_mm": ("image", np.uint16),
    "observation.images.depth_m": ("image", np.float32),
}


@pytest.fixture(scope="module")
def depth_root(tmp_path_factory):
    """LeRobot's three ways to hold depth maps: 12-bit video, uint16 millimetres and float32 metres in TIFF."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    root = tmp_path_factory.mktemp("depth") / "depth"
    names = ["height", "width", "channels"]
    features = {
        key: {"dtype": dtype, "shape": (64, 80, 1), "names": names, "info": {"is_depth_map": True}}
        for key, (dtype, _) in DEPTHS.items()
    }
    features["action"] = {"dtype": "float32", "shape": (2,), "names": ["a", "b"]}
    dataset = LeRobotDataset.create("local/depth", fps=FPS, features=features, root=root, use_videos=True)
    rng = np.random.default_rng(0)
    for _ in range(2):
        for _ in range(5):
            mm = rng.integers(0, 12_000, (8, 10)).repeat(8, axis=0).repeat(8, axis=1)[..., None].astype(np.uint16)
            frame = {key: mm if kind is np.uint16 else (mm / 1000).astype(kind) for key, (_, kind) in DEPTHS.items()}
            dataset.add_frame({**frame, "action": np.zeros(2, np.float32), "task": "look"})
        with writing_videos():
            dataset.save_episode(parallel_encoding=False)
    dataset.finalize()
    return root


@pytest.mark.parametrize("windows", [None, {key: [-0.1, 0.0] for key in DEPTHS}], ids=["plain", "windows"])
def test_depth_maps_equal_lerobots(depth_root, windows):
    reference = lerobot(depth_root, delta_timestamps=windows)
    source = datasource([load_metadata(depth_root)], delta_timestamps=windows, image_size=(16, 16))
    (rows,) = source.read_rows(range(10), 10)
    assert {k: (v.dtype, v.shape[1:]) for k, v in rows.items() if k in DEPTHS} == {
        k: (v.dtype, v.shape[1:]) for k, v in source.example().items() if k in DEPTHS
    }
    assert source.row_bytes() >= sum(rows[key][0].nbytes for key in DEPTHS)
    for i in range(10):
        for key in DEPTHS:
            theirs = np.moveaxis(reference[i][key].numpy(), -3, -1)
            assert rows[key].dtype == theirs.dtype == np.float32 and theirs.max() > 1000  # millimetres
            np.testing.assert_array_equal(rows[key][i], theirs, err_msg=key)


def test_cached_depth_maps_equal_decoded(depth_root, tmp_path, monkeypatch):
    meta = load_metadata(depth_root)
    plain = datasource([meta])
    cached = datasource([meta], frame_cache=FrameCache(str(tmp_path), 1.0))
    (expected,), (first,) = (list(source.read_rows(range(10), 10)) for source in (plain, cached))
    monkeypatch.delattr(lerobot_decode.VideoReader, "read")
    (later,) = cached.read_rows(range(10), 10)
    for rows in (first, later):
        for key, values in expected.items():
            np.testing.assert_array_equal(rows[key], values)


def test_depth_table_equals_lerobots_and_refuses_invalid_ranges():
    import torch
    from lerobot.datasets.depth_utils import dequantize_depth

    codes = torch.arange(4096).reshape(1, 64, 64)
    stated = {"depth_min": 0.3, "depth_max": 2.7, "shift": 1.1, "use_log": False}
    table = lerobot_decode.depth_table({f"video.{k}": v for k, v in stated.items()}, name="x")
    np.testing.assert_array_equal(table, dequantize_depth(codes, **stated).numpy().ravel())
    assert not np.array_equal(table, lerobot_decode.depth_table({}, name="x"))
    for wrong in ({"video.depth_min": -9.0}, {"video.depth_min": "near"}, {"video.depth_max": float("nan")}):
        with pytest.raises(ValueError, match="camera x: the depths that info states"):
            lerobot_decode.depth_table({"is_depth_map": True, **wrong}, name="camera x")


def test_rgb_image_as_depth_map_is_refused(depth_root, tmp_path):
    root = shutil.copytree(depth_root, tmp_path / "depth")
    file = io.BytesIO()
    Image.new("RGB", (80, 64)).save(file, "png")
    set_row("observation.images.depth_mm", 3, {"bytes": file.getvalue(), "path": None})(root)
    with pytest.raises(ValueError, match=r"episode 0\), row 3: expected a depth map of uint16 or float32"):
        read_directly(datasource([load_metadata(root)]))


def test_depth_video_without_lerobot_names_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lerobot.datasets.depth_utils", None)
    with pytest.raises(ImportError, match=r"camera d: depth needs pip install '.\[train\]'; else leave it out"):
        lerobot_decode.depth_table({}, name="camera d")
