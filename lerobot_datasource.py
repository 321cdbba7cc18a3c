"""Read LeRobot datasets as a Ray Data source: metadata -> plan -> read tasks -> decoded Arrow blocks.

Rows are those of ``LeRobotDataset.__getitem__`` (pyav backend, ``return_uint8=True``), except that camera columns are
uint8 (H, W, 3), depth maps float32 (H, W, 1), `index` is absolute, and there is one more column, `dataset_index`. A
read task holds positions of the stream of rows. It looks them up in the plan (`data/plan.py`), of which each node has
one copy, and decodes their frames, each video forward, into arrays that become fixed-shape tensors of Arrow blocks
without a copy.

The module does not import torch, policies or training.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.data import Dataset
from ray.data.block import BlockMetadata
from ray.data.context import DataContext
from ray.data.datasource import Datasource, ReadTask

from vla_finetuning.columns import IS_SKIPPED
from vla_finetuning.data.dataset import CAMERA_DTYPES, NUMERIC_DTYPES, DatasetMetadata, select_episodes
from vla_finetuning.data.dataset_files import check_files
from vla_finetuning.data.disk_cache import FrameCache
from vla_finetuning.data.features import check_image_size, common_features, resolve_delta_indices
from vla_finetuning.data.frames import frame_ranges_of
from vla_finetuning.data.metadata import check_readable, key_frame_rows, load_metadata
from vla_finetuning.data.options import WINDOW_SEGMENTS, Features, Order, Reading, Selection
from vla_finetuning.data.plan import StreamPlan, at_blocks, window_and_segment
from vla_finetuning.data.read_tasks import ReadFunction, planned_episodes, reads_per_task
from vla_finetuning.data.reader import ReadOptions, for_read_tasks, frame_spec
from vla_finetuning.data.rows import IS_PAD, ReadContext, column_to_numpy, read_rows, row_dtype
from vla_finetuning.data.selection import of_each
from vla_finetuning.data.shards import Plan, ShardedPlan
from vla_finetuning.data.storage import StoragePolicy
from vla_finetuning.environment import FRAME_CACHE_GB
from vla_finetuning.options.dataset import DatasetOptions, OnError
from vla_finetuning.options.fields import did_you_mean

# Maximum rows of a segment: fewer mix better and seek more often (docs/data_engine.md). A small window has shorter
# segments, so that it still mixes `window_segments` of them.
SEGMENT_ROWS = 16
# Bytes of a window, which a read task holds in memory.
READ_BYTES = 192 * 2**20
BLOCK_BYTES = 32 * 2**20
# Reads of an execution. Ray Data lists its read tasks up front, so longer streams run as several executions.
READS_PER_EXECUTION = 4096
# Maximum number of tasks of an execution of any length.
MAX_TASKS = 4096
# Keys in the context of a dataset: the `BlockShare` that its executions read (None for all blocks), whether nodes cache
# all its frames, and its number of shards.
SHARE = "lerobot_share"
CACHING = "lerobot_caching"
SHARDS = "lerobot_shards"


class LeRobotDatasource(Datasource):
    """Ray Data source over `metas`, in the order of `dataset_index`. Most callers want `read_lerobot`."""

    def __init__(
        self,
        metas: Sequence[DatasetMetadata],
        selection: Selection = Selection(),  # noqa: B008  (frozen)
        features: Features = Features(),  # noqa: B008
        order: Order = Order(),  # noqa: B008
        reading: Reading = Reading(),  # noqa: B008
    ):
        super().__init__()
        self._reading, self.num_cpus = reading, reading.num_cpus
        self._skips = reading.on_error == "skip"  # rows that cannot be read are blank
        self._projection_map: dict[str, str] | None = None
        self.metas = tuple(metas)
        ranges = selection.frame_ranges
        episodes = selection.episodes if ranges is None else [r.episodes for r in ranges]
        # One of several datasets may have no episodes, unless a mixture needs rows of each.
        may_be_empty = len(self.metas) > 1 and selection.weights is None
        selected = [
            select_episodes(meta, None if episodes is None else episodes[i], may_be_empty)
            for i, meta in enumerate(self.metas)
        ]
        if not any(map(len, selected)):
            raise ValueError(f"no episode is chosen of any of the {len(self.metas)} datasets")
        for meta, chosen in zip(self.metas, selected, strict=True):
            check_readable(meta, chosen, features.camera_keys, lambda broken: f"choose `episodes` without {broken}")
        image_size = check_image_size(features.image_size)
        self._features = common_features(
            self.metas, features.camera_keys, features.columns, image_size, features.padded
        )
        if features.delta_timestamps and not features.window_steps and len({meta.fps for meta in self.metas}) > 1:
            raise ValueError(
                f"datasets of different frame rates cannot be read together in windows: "
                f"{', '.join(f'{meta.root} has {meta.fps} fps' for meta in self.metas)}; an action chunk would span "
                "other times in each. Convert them to one rate, or give vla.py the fps of the slower one in a mixture"
            )
        self._delta_indices = resolve_delta_indices(
            features.delta_timestamps, self._features, self.metas[0], features.tolerance_s
        )
        # `_options` adds what depends on the projection.
        self._read_options = ReadOptions(
            columns=(),
            delta_indices=self._delta_indices,
            block_rows=1,
            window_steps=tuple(features.window_steps or ()),
            padded=self._features if features.padded else {},
            skip_log=reading.skip_log,
            tolerance_s=features.tolerance_s,
            threads=max(1, round(reading.num_cpus)),
            image_size=image_size,
            frame_cache=reading.frame_cache,
        )
        self._with_position = order.stream is not None
        for meta, chosen in zip(self.metas, selected, strict=True) if reading.check_files else ():
            if len(chosen):
                videos = [key for key in meta.video_keys if key in self._features]
                check_files(meta, episodes=chosen, camera_keys=videos, skip=self._skips)

        segments = None if order.shuffle_seed is None else order.window_segments
        cameras = [feature for meta in self.metas for key, feature in meta.features.items() if key in self._features]
        cut_at = key_frame_rows(cameras)
        window, segment = window_and_segment(
            order.shuffle_window, READ_BYTES // self.row_bytes(), SEGMENT_ROWS, segments, cut_at
        )
        if ranges is None:
            ranges = [frame_ranges_of(*both) for both in zip(self.metas, selected, strict=True)]
        planned, weight = planned_episodes(self.metas, ranges)
        roots = [meta.root for meta in self.metas]
        plan = partial(
            StreamPlan,
            segment_rows=segment if order.shuffle_seed is not None else max(window, SEGMENT_ROWS),
            window_rows=window,
            cut_at=cut_at,
            weights=selection.weights,
            later_segment_rows=1 if order.global_shuffle else None,
            roots=roots,
        )
        self.shards = 1 if order.sharding is None else order.sharding.count
        self.plan: Plan
        if order.sharding is None:
            self.plan = plan(planned, seed=order.shuffle_seed, episode_weights=weight)
        else:
            self.plan = ShardedPlan(planned, weight, order.sharding, cut_at, roots, seed=order.shuffle_seed, plan=plan)
        self._stream = order.stream or (0, self.plan.rows_per_epoch)
        self._window, self._prescribed_rows = window, order.block_rows
        self.block_rows = self.block()
        self._stored_context: tuple[Any, Any] | None = None
        self._read_rows = max(window, self.block_rows)
        reads = READS_PER_EXECUTION * self.shards
        self._rows_per_execution = max(1, reads * self._read_rows // order.rows_multiple) * order.rows_multiple

    # ---- the interface of Ray Data -----------------------------------------------------------------------------

    def get_name(self) -> str:
        return "LeRobot"

    def supports_projection_pushdown(self) -> bool:
        return self._reading.prepare is None

    def apply_projection(self, projection_map: dict[str, str] | None) -> Datasource:
        """Return the source of these columns. Raises ValueError for an unknown one."""
        names = self.columns()
        if unknown := [name for name in projection_map or {} if name not in names]:
            raise ValueError(
                f"no column {unknown[0]!r}{did_you_mean(unknown[0], names)}; the columns are {list(names)}"
            )
        source = copy.copy(self)
        if projection_map is not None:  # in its own order; Ray's method keeps the order of an earlier projection
            source._projection_map = {name: name for name in projection_map}
        return source

    def columns(self) -> tuple[str, ...]:
        """Return the columns of a row, in order, after projection."""
        names = list(self._features)
        names += [key + IS_PAD for key in self._delta_indices]
        names += ["task", "dataset_index"]
        names += ["position"] * self._with_position + [IS_SKIPPED] * self._skips
        projection = self._projection_map
        if projection is None:
            return tuple(names)
        # Ray selects no column when it only counts rows: a row must still have one. `select_columns` orders columns.
        return tuple(projection) or ("dataset_index",)

    def _frames(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Return shape and dtype of a frame of each camera that is read."""
        features = {key: self._features[key] for key in self.columns() if key in self._features}
        return {
            key: frame_spec(f, self._read_options.image_size) for key, f in features.items() if f.dtype in CAMERA_DTYPES
        }

    def _frame_bytes(self) -> dict[str, int]:
        return {key: math.prod(shape) * dtype.itemsize for key, (shape, dtype) in self._frames().items()}

    def row_bytes(self) -> int:
        """Return the bytes of a row in the object store."""
        frames, total = self._frame_bytes(), 0
        for key in self.columns():
            if key in frames:
                size = frames[key]
            elif key in self._features:
                size = math.prod(self._features[key].shape) * 4
            else:
                size = 16
            total += size * len(self._delta_indices.get(key, (0,)))
        return max(total, 1)

    def decoded_bytes(self) -> int:
        """Return the bytes of all different frames that a node decodes in an epoch: the size of their cache."""
        frames, episodes = self._frame_bytes(), self.plan.episodes
        sizes = [sum(frames[key] for key in frames.keys() & meta.features) for meta in self.metas]
        return int(episodes.length @ np.array(sizes)[episodes.dataset_index]) // self.shards

    def block(self) -> int:
        """Return the rows of a block of this projection; they divide those of a window unless they are prescribed."""
        max_rows = max(1, min(self._window, BLOCK_BYTES // self.row_bytes()))
        return self._prescribed_rows or next(n for n in range(max_rows, 0, -1) if self._window % n == 0)

    def row_frames(self) -> int:
        return sum(len(self._delta_indices.get(key, (0,))) for key in self._frames())

    def estimate_inmemory_data_size(self) -> int:
        return self.row_bytes() * (self._stream[1] - self._stream[0])

    def example(self) -> dict[str, np.ndarray]:
        """Return a placeholder row, batched, with the columns, shapes and dtypes of numpy batches."""
        row: dict[str, np.ndarray] = {"dataset_index": np.zeros(1, np.int32), "position": np.zeros(1, np.int64)}
        row |= {"task": np.array(["a"], object), IS_SKIPPED: np.zeros(1, bool)}
        row |= {key + IS_PAD: np.zeros((1, len(window)), bool) for key, window in self._delta_indices.items()}
        frames = self._frames()
        for key, feature in self._features.items():
            window = (len(self._delta_indices[key]),) if key in self._delta_indices else ()
            if key in frames:
                shape, dtype = frames[key]
                row[key] = np.zeros((1, *window, *shape), dtype)
            elif feature.dtype in NUMERIC_DTYPES:
                entries = () if feature.shape == (1,) else feature.shape
                row[key] = np.zeros((1, *window, *entries), row_dtype(feature))
            else:
                row[key] = np.array([""], object)
        return {key: row[key] for key in self.columns()}

    def execution(self, number: int) -> tuple[int, int]:
        """Return the stream positions that the `number`-th execution reads."""
        if not self._with_position:
            return self._stream
        first = min(self._stream[0] + number * self._rows_per_execution, self._stream[1])
        return first, min(first + self._rows_per_execution, self._stream[1])

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        """Return the read tasks of an execution; their shared context is put into the object store once.

        `parallelism` is ignored: memory and windows decide the number of tasks, or `num_tasks`.
        """
        first, last = self.execution(getattr(data_context, "_execution_idx", 0))
        share = None if data_context is None else data_context.get_config(SHARE)
        runs = np.array([[first, last]]) if share is None else share.runs(first, last, self.block_rows)
        options, context = self._options(self.block()), self._put_context()
        tasks = []
        for reads in self._reads_of_tasks(runs, first, last, shared=share is not None):
            if per_task_row_limit is not None and share is None:
                until = reads[0][0, 0] + max(1, per_task_row_limit)  # Ray cuts `limit(0)` itself
                reads = [read.clip(max=until) for read in reads if read[0, 0] < until]
            function = ReadFunction(context, reads, options)
            size = function.rows * self.row_bytes()
            metadata = BlockMetadata(num_rows=function.rows, size_bytes=size, input_files=None, exec_stats=None)
            tasks.append(ReadTask(function, metadata, per_task_row_limit=per_task_row_limit))
        return tasks

    def _put_context(self) -> Any:
        """Return the ObjectRef of the context of read tasks, on this node."""
        key = ray.get_runtime_context().get_node_id(), self.columns()
        if self._stored_context is None or self._stored_context[0] != key:
            self._stored_context = key, ray.put(self._context())
        return self._stored_context[1]

    def _context(self) -> ReadContext:
        metas = [for_read_tasks(meta, self.columns()) for meta in self.metas]
        return ReadContext(self.plan, metas, self._reading.prepare)

    def _task_rows(self, first: int, last: int) -> int:
        """Estimate the rows of a read task in an execution of stream positions [first, last)."""
        if self._reading.num_tasks is not None:
            return max(1, -(-(last - first) // self._reading.num_tasks))
        turns = (last - first) // self._read_rows
        reads = reads_per_task(turns, self._read_rows * self.row_bytes(), ray.cluster_resources())
        return self._read_rows * max(reads, -(-turns // MAX_TASKS))

    def _reads_of_tasks(self, runs: np.ndarray, first: int, last: int, *, shared: bool) -> Iterator[list[np.ndarray]]:
        """Yield the reads of each task of stream positions [first, last): the `runs` in a window each.

        Where two shares have rows of one window, each decodes its own.
        """
        task_rows = self._task_rows(first, last)
        if shared:
            cuts = self.plan.window_starts(int(runs[0, 0]), last) if len(runs) else np.empty(0, np.int64)
        else:
            read_rows = min(self._read_rows, task_rows)
            cuts = np.arange((first // read_rows + 1) * read_rows, last, read_rows, dtype=np.int64)
        bounds = at_blocks(first, cuts, last, min(self.block_rows, task_rows))
        begins, ends = np.searchsorted(runs[:, 1], bounds[:-1], "right"), np.searchsorted(runs[:, 0], bounds[1:])
        reads: list[np.ndarray] = []
        rows, goal = 0, task_rows
        for begin, end, a, b in np.stack([begins, ends, bounds[:-1], bounds[1:]], axis=1).tolist():
            if begin < end:
                reads.append(np.minimum(np.maximum(runs[begin:end], a), b))
                rows += int((reads[-1][:, 1] - reads[-1][:, 0]).sum())
            if reads and rows >= goal:  # of all tasks, since cuts at whole blocks may be short of a task's rows
                yield reads
                reads, goal = [], goal + task_rows
        if reads:
            yield reads

    def read_rows(self, positions: Sequence[int], batch_size: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield the rows at ascending stream positions as numpy batches, decoded in this process, without Ray."""
        context, options = replace(self._context(), prepare=None), self._options(block_rows=batch_size)
        for first in range(0, len(positions), batch_size):
            begin = np.asarray(positions[first : first + batch_size], np.int64)
            cuts = np.flatnonzero(np.diff(begin) != 1) + 1
            runs = np.stack([begin[np.r_[0, cuts]], begin[np.r_[cuts - 1, -1]] + 1], axis=-1)  # of consecutive rows
            (table,) = read_rows(context, runs, options)
            yield {name: column_to_numpy(table.column(name)) for name in table.column_names}

    def _options(self, block_rows: int) -> ReadOptions:
        blank = self.example() if self._skips else None
        return replace(self._read_options, columns=self.columns(), block_rows=block_rows, blank=blank)


# ---- the public functions ----------------------------------------------------------------------------------------


def read_lerobot(
    root: str | Path | Sequence[str | Path] | Mapping[str, float],
    *,
    episodes: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    camera_keys: Sequence[str] | None = None,
    delta_timestamps: Mapping[str, Sequence[float]] | None = None,
    image_size: Sequence[int] | None = None,
    shuffle_seed: int | None = None,
    shuffle_window: int = DatasetOptions.shuffle_window,
    window_segments: int = WINDOW_SEGMENTS,
    tolerance_s: float = 1e-4,
    storage_options: dict[str, Any] | None = None,
    storage_policy: StoragePolicy | None = None,
    override_num_blocks: int | None = None,
    num_cpus: float = 1,
    on_error: OnError = "stop",
    frame_cache: str | Path | None = None,
    frame_cache_gb: float = FRAME_CACHE_GB,
    memory: float | None = None,
    concurrency: int | None = None,
    label_selector: dict[str, str] | None = None,
    ray_remote_args: dict[str, Any] | None = None,
) -> Dataset:
    """Read LeRobot datasets as a Ray Dataset of frames.

    Every execution yields the rows in the same order. Read with another `shuffle_seed` for another order.

    Args:
        root: a path or URI (`s3://`, `gs://`), a list of them, or a mixture, `{root: weight}`. A mixture needs a
            `shuffle_seed`. It yields as many rows as its datasets hold together, shared among them by weight and spread
            evenly: a dataset with more than its natural share repeats rows, one with less yields a part of its rows.
        episodes: episode numbers; with several roots, `{root: numbers}`. None for all.
        camera_keys: cameras to decode; None for all.
        delta_timestamps: offsets in seconds by column, e.g. ``{"action": [0.0, 1 / 30, 2 / 30]}``. The column then has
            a leading time axis, and `<key>_is_pad` marks offsets outside the episode, where the edge repeats.
        image_size: (height, width) that frames are resized to after decoding, padded with black as by PI0.5 for its
            224x224, within one level of uint8 (`vla_finetuning.data.decode.resize_with_pad`). Rows in the object store
            are then 1.5 times smaller for cameras of 240x320, 6.1 times for 480x640. None keeps the stored size.
        shuffle_seed: seed of the order of rows (see `data.plan`); None for stored order.
        shuffle_window: number of rows that are shuffled together, reduced to bound memory.
        window_segments: least number of places in the dataset from which a window takes rows. More mix better and cost
            decoding (docs/data_engine.md).
        tolerance_s: largest distance of a video frame from its row's timestamp, in seconds.
        storage_options: obstore's options of the store (`endpoint`, `access_key_id`, …); None for the environment's.
        storage_policy: time limits of requests to object stores, and a local cache (`storage.StoragePolicy`).
        override_num_blocks: about how many read tasks; None to derive it from memory.
        num_cpus: CPUs of a read task, which decodes with as many threads.
        on_error: "stop" raises an error that names an episode that cannot be read. "skip" replaces its rows with blank
            ones, marked in the column `is_skipped`, and logs a warning.
        frame_cache: folder on each node's own disk that caches decoded frames for all reads; None for no cache.
        frame_cache_gb: maximum size of the cache on a node, in 10^9 bytes. Frames that do not fit are decoded each
            time.
        memory: bytes that a read task reserves, as in Ray's own `read_*`, like the rest.
        concurrency: maximum number of concurrent read tasks.
        label_selector: labels of the nodes that read, for example to exclude nodes with GPUs.
        ray_remote_args: further options of read tasks.

    Returns:
        One row per frame. Cameras: uint8 (H, W, 3), or (T, H, W, 3) when windowed. Depth maps: float32 (H, W, 1), in
        millimetres, at their stored size. Numbers: float32, int64 or bool, shaped as in `meta/info.json` (shape (1,) is
        a scalar). LeRobot's language columns: JSON text of their lists. `task`: the instruction. `index`: the row's
        place in its dataset; `(dataset_index, index)` identifies a frame.

    Raises:
        ValueError, FileNotFoundError: on the driver, for errors that the metadata and a listing of the files show; in
            the read task, naming file, episode and time, for damaged files or videos that contradict the metadata.
    """
    if isinstance(camera_keys, str):
        raise ValueError(f"read_lerobot: camera_keys={camera_keys!r}: expected a list of cameras")
    for name, number in (("tolerance_s", tolerance_s), ("frame_cache_gb", frame_cache_gb)):
        if isinstance(number, bool) or not isinstance(number, int | float | np.number) or not 0 < number < math.inf:
            raise ValueError(f"read_lerobot: {name}={number!r}: expected a positive number")
    for name, number, least in (
        ("shuffle_seed", 0 if shuffle_seed is None else shuffle_seed, 0),
        ("shuffle_window", shuffle_window, 1),
        ("window_segments", window_segments, 1),
    ):
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < least:
            raise ValueError(f"read_lerobot: {name}={number!r}: expected a whole number, at least {least}")
    if not isinstance(root, str | Path) and not len(root):
        raise ValueError("read_lerobot: root is empty: give a dataset, or several")
    roots: list[str | Path] = [root] if isinstance(root, str | Path) else list(root)
    metas = [load_metadata(r, storage_options=storage_options, storage_policy=storage_policy) for r in roots]
    chosen = {str(k): v for k, v in episodes.items()} if isinstance(episodes, Mapping) else episodes
    per_root = of_each(chosen, [str(r) for r in roots], "episodes")
    cache = None if frame_cache is None else FrameCache(str(Path(frame_cache).expanduser().absolute()), frame_cache_gb)
    source = LeRobotDatasource(
        metas,
        Selection(per_root, weights=list(root.values()) if isinstance(root, Mapping) else None),
        Features(camera_keys, delta_timestamps=delta_timestamps or {}, image_size=image_size, tolerance_s=tolerance_s),
        Order(shuffle_seed=shuffle_seed, shuffle_window=shuffle_window, window_segments=window_segments),
        Reading(num_cpus=num_cpus, num_tasks=override_num_blocks, on_error=on_error, frame_cache=cache),
    )
    return read_source(
        source, memory=memory, concurrency=concurrency, label_selector=label_selector, ray_remote_args=ray_remote_args
    )


def read_source(source: LeRobotDatasource, **ray_options: Any) -> Dataset:
    """Return a Ray Dataset over `source` that keeps its blocks. `ray_options` are those of its read tasks."""
    # With fewer blocks than the source has tasks, Ray does not split their output...
    dataset = ray.data.read_datasource(source, override_num_blocks=1, num_cpus=source.num_cpus, **ray_options)
    # ... and with a target a little below a block's size, Ray passes each block on at once, neither merged nor cut.
    block_bytes = source.block() * (source._reading.prepared_bytes or source.row_bytes())
    dataset.context.target_max_block_size = max(1, int(0.8 * block_bytes))
    # By default, Ray Data (2.60) passes blocks on as tasks end. A dataset's context is its own copy.
    dataset.context.execution_options.preserve_order = True
    cache = source._reading.frame_cache
    dataset.context.set_config(CACHING, cache is not None and 0 < source.decoded_bytes() <= cache.gb * 1e9)
    # Blocks that a task may have ready before Ray Data takes them, ten times a second; with more, it waits with its CPU
    # idle. Ray Data counts them as bytes in flight. The name is private in Ray 2.60; its default is 2.
    dataset.context._max_num_blocks_in_streaming_gen_buffer = 2 + source._read_rows // source.block_rows
    dataset.context.set_config(SHARDS, source.shards)
    return dataset
