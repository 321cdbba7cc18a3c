"""Small LeRobot v3 datasets for the tests, written by LeRobot's own writer.

Import as `from tests.datasets import make_dataset` (never with `tests/` itself on `sys.path`: the module
would then hide Hugging Face's `datasets`).
"""

import atexit
import contextlib
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lerobot_datasource import LeRobotDatasource
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.data.options import Features, Order, Reading, Selection
from vla_finetuning.envs.writing import writing_videos

FRAME_NUMBER_BITS = 16
EXTRA_FEATURES: dict[str, dict] = {
    "next.done": {"dtype": "bool", "shape": (1,), "names": None},
    "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
    "observation.counter": {"dtype": "int64", "shape": (2,), "names": ["up", "down"]},
    "observation.grid": {"dtype": "float32", "shape": (2, 3), "names": None},
}


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def remove_episodes(root: Path, gone: Collection[int]) -> None:
    """Take episodes out of the metadata, as tools do that leave a gap in the numbering."""
    lengths: list[int] = []
    for path in (root / "meta/episodes").rglob("*.parquet"):
        table = pq.read_table(path)
        table = table.filter(pa.array([n not in gone for n in table["episode_index"].to_pylist()]))
        lengths += table["length"].to_pylist()
        pq.write_table(table, path)
    totals = {"total_episodes": len(lengths), "total_frames": sum(lengths)}
    edit_json(root / "meta/info.json", lambda info: info.update(totals))


def add_subtasks(root: Path, number_of: Callable[[int], int], texts: Sequence[str]) -> None:
    """Give a dataset's frames subtasks, by `index` -> the number of a text, as LeRobot wrote them until 0.5."""
    import pandas as pd

    feature = {"dtype": "int64", "shape": [1], "names": None}
    edit_json(root / "meta/info.json", lambda info: info["features"].update(subtask_index=feature))
    for path in (root / "data").rglob("*.parquet"):
        table = pq.read_table(path)
        column = pa.array(map(number_of, table["index"].to_pylist()), pa.int64())
        pq.write_table(table.append_column("subtask_index", column), path)
    pd.DataFrame({"subtask_index": range(len(texts))}, index=list(texts)).to_parquet(root / "meta/subtasks.parquet")


def make_dataset(root: Path, **options: Any) -> Path:
    """Write a dataset as `write_dataset` does. Equal ones are written once in a run of the tests, and copied."""
    written = _written() / hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest()
    if not written.exists():
        own = _written() / f"by-{os.getpid()}"
        own.mkdir(exist_ok=True)
        begun = write_dataset(own / written.name, **options)
        with contextlib.suppress(OSError):  # another process has written it meanwhile
            begun.rename(written)
    return Path(shutil.copytree(written, root))


@functools.cache
def _written() -> Path:
    """Return the folder of a run of pytest, whose processes share it; else one of this process."""
    if "TEST_DATASETS_DIR" in os.environ:
        return Path(os.environ["TEST_DATASETS_DIR"])
    folder = tempfile.mkdtemp(prefix="vla-tests-datasets-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def write_dataset(
    root: Path,
    *,
    episodes: Sequence[int] = (12, 7, 15, 1, 10, 9),
    cameras: Mapping[str, tuple[int, int]] | None = None,
    image_cameras: Mapping[str, tuple[int, int]] | None = None,
    fps: int = 10,
    state_dim: int = 4,
    action_dim: int = 3,
    extra_features: bool = False,
    tasks: Sequence[str] = ("go to the red bin", "go to the blue bin"),
    data_files_size_in_mb: float = 0.005,
    video_files_size_in_mb: float = 0.008,
    chunks_size: int = 2,
    vcodec: str | None = None,
    seed: int = 0,
    noise: int = 0,
    true_quantiles: bool = True,
    texts: Mapping[str, Sequence[str]] | None = None,
) -> Path:
    """Write a dataset at `root` (which must not exist yet) and return `root`.

    Every frame is a function of `seed`, its camera and its place only, so equal arguments give equal content.

    Args:
        episodes: frames of each episode.
        cameras: video features, `{"observation.images.top": (height, width)}`. None: two cameras of different
            size; `{}`: none.
        image_cameras: features stored as images inside the parquet files, same form.
        extra_features: also write `EXTRA_FEATURES` (bool scalar, float scalar, int64 vector, 2-D array). The
            2-D one only if every episode has two frames or more: LeRobot 0.6.1 gives its statistics another
            shape for a single frame and then fails to aggregate them.
        tasks: the instruction of episode `i` is `tasks[i % len(tasks)]`.
        data_files_size_in_mb, video_files_size_in_mb: size at which LeRobot starts another file, in MB. The
            defaults give several files of each kind; `100` gives one.
        chunks_size: files per `chunk-XXX` folder.
        vcodec: None is LeRobot's default encoder (AV1, a key frame every 2); or `"h264"`, with g = 10.
        noise: of so many levels in every frame, which then is as large, compressed, as a real one.
        state_dim, action_dim: 0: none.
        texts: columns of texts; that of the dataset's n-th frame is the n-th, and after the last one the first again.
        true_quantiles: put those of all rows into stats.json; else LeRobot's means of the episodes' quantiles stay,
            which most values of so short episodes lie outside of.
    """
    from lerobot.configs.video import RGBEncoderConfig
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    root = Path(root)
    if cameras is None:
        cameras = {"observation.images.top": (48, 64), "observation.images.wrist": (96, 80)}
    image_cameras = image_cameras or {}
    features: dict[str, dict] = {}
    for key, name, dimensions in (("observation.state", "joint", state_dim), ("action", "motor", action_dim)):
        if dimensions:
            names = [f"{name}_{number}" for number in range(dimensions)]
            features[key] = {"dtype": "float32", "shape": (dimensions,), "names": names}
    features |= {key: {"dtype": "string", "shape": (1,), "names": None} for key in texts or ()}
    for dtype, sizes in (("video", cameras), ("image", image_cameras)):
        for key, size in sizes.items():
            features[key] = {"dtype": dtype, "shape": (*size, 3), "names": ["height", "width", "channels"]}
    if extra_features:
        features.update(EXTRA_FEATURES)
        if min(episodes) < 2:
            del features["observation.grid"]

    encoder = RGBEncoderConfig() if vcodec is None else RGBEncoderConfig(vcodec=vcodec, g=10, preset="ultrafast")
    dataset = LeRobotDataset.create(
        repo_id=f"local/{root.name}",
        fps=fps,
        features=features,
        root=root,
        robot_type="test_arm",
        use_videos=bool(cameras),
        rgb_encoder=encoder,
        encoder_threads=1,
    )
    with writing_videos():
        # Float sizes are accepted here and, unlike whole megabytes, make datasets of 60 frames roll over.
        dataset.meta.update_chunk_settings(chunks_size, data_files_size_in_mb, video_files_size_in_mb)

        rng = np.random.default_rng(seed)
        number = 0
        for episode_index, length in enumerate(episodes):
            offset = rng.normal(size=state_dim)
            for frame_index in range(length):
                phase = 0.3 * frame_index
                frame = {
                    "observation.state": (offset + np.sin(phase + np.arange(state_dim))).astype(np.float32),
                    "action": rng.normal(episode_index, 1.0, size=action_dim).astype(np.float32),
                    "task": tasks[episode_index % len(tasks)],
                }
                frame = {key: value for key, value in frame.items() if key in features or key == "task"}
                frame |= {key: column[number % len(column)] for key, column in (texts or {}).items()}
                if extra_features:
                    frame["next.done"] = np.array([frame_index == length - 1])
                    frame["next.reward"] = rng.normal(size=1).astype(np.float32)
                    frame["observation.counter"] = np.array([frame_index, length - frame_index], dtype=np.int64)
                if "observation.grid" in features:
                    frame["observation.grid"] = rng.normal(size=(2, 3)).astype(np.float32)
                for camera_number, (key, size) in enumerate({**cameras, **image_cameras}.items()):
                    frame[key] = draw_frame(number, size, seed=seed * 1000 + camera_number)
                    if noise:
                        # Of the texture too: halved, so that nothing overflows.
                        frame[key] = frame[key] // 2 + rng.integers(0, noise, frame[key].shape, np.uint8)
                dataset.add_frame(frame)
                number += 1
            # One process: starting encoder processes costs more than encoding a few small frames.
            dataset.save_episode(parallel_encoding=False)
        dataset.finalize()
    if true_quantiles:
        describe_truly(root)
    return root


def make_layouts(base: Path, **options: Any) -> dict[str, Path]:
    """A dataset twice, by layout: a row group per "file", as converted ones have, and per "episode", as recorded ones.

    `options`: as for `make_dataset`.
    """
    recorded = make_dataset(base / "episode", **options)
    converted = Path(shutil.copytree(recorded, base / "file"))
    for path in converted.glob("data/*/*.parquet"):
        pq.write_table(pq.read_table(path), path)
    return {"file": converted, "episode": recorded}


def describe_truly(root: Path) -> None:
    """Replace the quantiles of vectors in stats.json by those of all rows."""
    path = root / "meta" / "stats.json"
    stats = json.loads(path.read_text())
    for key, values in all_rows(root, [key for key in stats if "q01" in stats[key]]).items():
        for name in ("q01", "q10", "q50", "q90", "q99"):
            quantile = np.quantile(values, int(name[1:]) / 100, axis=0, method="inverted_cdf")
            stats[key][name] = np.atleast_1d(quantile).tolist()
    path.write_text(json.dumps(stats))


def all_rows(root: Path, keys: Sequence[str]) -> dict[str, np.ndarray]:
    """Those of `keys` that are columns of numbers: float64 (N, ...), in the dataset's order."""
    table = pa.concat_tables([pq.read_table(path) for path in sorted(root.glob("data/*/*.parquet"))])
    table = table.sort_by("index")
    columns = {key: table[key] for key in keys if key in table.column_names}
    numeric = {key: column for key, column in columns.items() if not pa.types.is_struct(column.type)}
    return {key: np.array(column.to_pylist(), dtype=np.float64) for key, column in numeric.items()}


def edit_rows(root: Path, column: str, change: Callable[[np.ndarray, np.ndarray, np.ndarray], object]) -> None:
    """Rewrite a column: `change(values, episode_index, frame_index)` edits an array of the whole dataset in place."""
    paths = sorted(root.glob("data/*/*.parquet"))
    tables = [pq.read_table(path) for path in paths]
    whole = pa.concat_tables(tables)
    values = np.array(whole[column].to_pylist(), dtype=object if pa.types.is_struct(whole[column].type) else None)
    change(values, whole["episode_index"].to_numpy(), whole["frame_index"].to_numpy())
    first = 0
    for path, table in zip(paths, tables, strict=True):
        at = table.schema.get_field_index(column)
        part = pa.array(values[first : first + len(table)].tolist(), table.schema.field(at).type)
        pq.write_table(table.set_column(at, table.schema.field(at), part), path)
        first += len(table)


def draw_frame(number: int, size: tuple[int, int], *, seed: int = 0) -> np.ndarray:
    """Draw frame `number` of a camera: uint8 (H, W, 3).

    The upper left quarter holds `number` in binary, as 4x4 black and white blocks that survive video
    compression (`read_frame_number`); below, a coloured square moves one step a frame over a fixed texture.
    """
    height, width = size
    rng = np.random.default_rng(seed)
    image = np.kron(rng.integers(40, 160, (-(-height // 8), -(-width // 8), 3)), np.ones((8, 8, 1)))
    image = image[:height, :width].astype(np.uint8)

    side = max(4, height // 4)
    left = (number * 3) % max(1, width - side)
    image[-side:, left : left + side] = rng.integers(0, 256, 3)

    bits = [(number >> bit) & 1 for bit in range(FRAME_NUMBER_BITS)]
    rows, columns = height // 8, width // 8
    blocks = np.kron(np.array(bits).reshape(4, 4), np.ones((rows, columns))) * 255
    image[: 4 * rows, : 4 * columns] = blocks[..., None]
    return image


def read_frame_number(image: np.ndarray) -> int:
    """Read the number that `draw_frame` drew, modulo 2**16, from uint8 (H, W, 3) of the original size."""
    rows, columns = image.shape[0] // 8, image.shape[1] // 8
    blocks = image[: 4 * rows, : 4 * columns].reshape(4, rows, 4, columns, 3).mean(axis=(1, 3, 4))
    return int(sum(1 << bit for bit, level in enumerate(blocks.ravel()) if level > 127))


def datasource(metas, **options):
    """A `LeRobotDatasource` with flat options: each goes to the value with a field of its name; None: the default."""
    options, values = {name: value for name, value in options.items() if value is not None}, []
    for kind in (Selection, Features, Order, Reading):
        own = {name: options.pop(name) for name in [field.name for field in fields(kind)] if name in options}
        values.append(kind(**own))
    assert not options, f"no such options: {sorted(options)}"
    return LeRobotDatasource(metas, *values)


def an_epoch(root, window, *, positions=None, **options):
    """Return the rows of an epoch, or those at `positions`, by `index`."""
    source = datasource([load_metadata(root)], shuffle_window=window, **options)
    positions = range(source.plan.rows_per_epoch) if positions is None else positions
    batches = list(source.read_rows(positions, window))
    order = np.argsort(np.concatenate([batch["index"] for batch in batches]))
    return {key: np.concatenate([batch[key] for batch in batches])[order] for key in batches[0]}


def assert_same_rows(found, expected):
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key].dtype == values.dtype
        np.testing.assert_array_equal(found[key], values, err_msg=key)
