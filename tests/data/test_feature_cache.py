"""Features cached by row: those of the frame and no other, whatever happens to files and folder."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.datasets import make_dataset
from vla_finetuning.data import disk_cache
from vla_finetuning.data.feature_cache import FeatureCache, FeatureStore
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.data.reader import Decoding

TOP, SIDE = "observation.images.top", "observation.images.side"
LENGTHS = (12, 7, 15, 1, 10)
ROWS = sum(LENGTHS)
SHAPES = {TOP: (3, 2), SIDE: (2, 2)}
DECODING = Decoding(tolerance_s=1e-4, threads=1)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A dataset of several videos, data files, and images; of one camera more than the other has."""
    folder = tmp_path_factory.mktemp("features")
    cameras = {"cameras": {TOP: (48, 64)}, "image_cameras": {SIDE: (16, 16)}}
    return make_dataset(folder / "two", episodes=LENGTHS, **cameras), make_dataset(
        folder / "one", episodes=(5, 6), cameras={TOP: (48, 64)}
    )


@pytest.fixture
def roots(original, tmp_path):
    """Copies to change."""
    return [Path(shutil.copytree(root, tmp_path / root.name)) for root in map(Path, original)]


def opened(roots, folder, *, gb=1.0, made_by="a tower", decoding=DECODING, shapes=None, dtype=np.float32):
    metas = [load_metadata(root) for root in roots]
    disk_cache.disk_cache.cache_clear()
    shapes = shapes or SHAPES
    return FeatureStore(FeatureCache(str(folder), gb), metas, decoding, shapes, np.dtype(dtype), made_by)


def features_of(camera, dataset, index):
    """Numbers that tell a frame from all others."""
    first = 1 + dataset * 1000 + index + 0.5 * (camera == TOP)
    return (first[:, None] + np.arange(np.prod(SHAPES[camera]))).reshape(-1, *SHAPES[camera]).astype(np.float32)


def everything(store):
    """Write the features of all frames; returns the rows, shuffled."""
    index = np.concatenate([np.arange(ROWS), np.arange(11)])
    dataset = np.repeat([0, 1], [ROWS, 11])
    order = np.random.default_rng(0).permutation(len(index))
    dataset, index = dataset[order], index[order]
    for camera in SHAPES:
        store.write(camera, dataset, index, features_of(camera, dataset, index))
    return dataset, index


def here(store, dataset, index, camera=TOP):
    return store.read(camera, dataset, index)[1]


def test_every_frame_has_its_own(roots, tmp_path):
    store = opened(roots, tmp_path / "kept")
    meta = load_metadata(roots[0])
    assert len(meta.video_files[TOP]) > 1 < len(meta.data_files)
    assert not here(store, *(rows := (np.zeros(3, int), np.arange(3)))).any()
    dataset, index = everything(store)
    for again in (store, opened(roots, tmp_path / "kept")):
        for camera in SHAPES:
            found, known = again.read(camera, dataset, index)
            assert known.all()
            lacks = (dataset == 1) & (camera == SIDE)  # that dataset has no such camera
            np.testing.assert_array_equal(found[~lacks], features_of(camera, dataset, index)[~lacks])
            assert not found[lacks].any()
    assert here(again, *rows).all()


@pytest.mark.parametrize(
    "changed",
    [
        {"made_by": "another tower"},
        {"decoding": replace(DECODING, image_size=(24, 32))},
        {"shapes": {**SHAPES, TOP: (2, 3)}},
        {"dtype": np.int32},
    ],
)
def test_what_is_made_otherwise_is_another(roots, tmp_path, changed):
    dataset, index = everything(opened(roots, tmp_path / "kept"))
    assert not here(opened(roots, tmp_path / "kept", **changed), dataset, index).any()
    assert here(opened(roots, tmp_path / "kept"), dataset, index).all()


@pytest.mark.parametrize("kind", ["videos", "data"])
def test_another_content_of_a_file_has_no_features(roots, tmp_path, kind):
    dataset, index = everything(opened(roots, tmp_path / "kept"))
    file = sorted(path for path in (roots[0] / kind).rglob("*.*") if path.is_file())[0]
    content = file.read_bytes()
    file.write_bytes(content)  # the same, but for all that is known
    known = here(opened(roots, tmp_path / "kept"), dataset, index)
    assert not known.all() and known[dataset == 1].all() and known[dataset == 0].any()


def test_an_episode_that_moved_in_its_video_has_no_features(roots, tmp_path):
    store = opened(roots, tmp_path / "kept")
    dataset, index = everything(store)
    moved = opened(roots, tmp_path / "kept")
    moved._metas[0].episode_video_start_s[TOP][1] += 0.1
    known = here(moved, dataset, index)
    assert not known[(dataset == 0) & (index >= 12) & (index < 19)].any() and known[dataset == 1].all()
