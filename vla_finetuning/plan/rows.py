"""The frames that a run trains on and holds out: which they are, their order, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lerobot_datasource import LeRobotDatasource
from vla_finetuning.data.feature_cache import FeatureCache, FeatureStore
from vla_finetuning.data.metadata import DatasetMetadata, how_drawn
from vla_finetuning.data.options import Features, Order, Reading, Selection
from vla_finetuning.data.per_frame import PerFrame
from vla_finetuning.data.plan import evenly_spaced
from vla_finetuning.data.reader import Decoding, frame_of

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class HeldOutRows:
    """Rows of the held-out episodes that the held-out loss is computed on, by their positions in stored order.

    Attributes:
        positions: int64 (N,), ascending. task: int64 (N,), indices into `tasks`. tasks: the instructions of the
            held-out episodes, the first of each episode.
        held_out: number of all held-out rows.
        dataset: int64 (N,), `dataset_index`.
    """

    positions: np.ndarray
    task: np.ndarray
    tasks: tuple[str, ...]
    held_out: int
    dataset: np.ndarray


@dataclass(frozen=True)
class Rows:
    """The rows of a run. Pickled in flight to training workers.

    Attributes:
        metas: the datasets; their position is a row's `dataset_index`.
        train_episodes, eval_episodes: per dataset, int64 arrays; disjoint.
        selection, features, order, reading: what the datasource of the training rows is asked for. The stream of
            `order` ends with the run's last row.
        per_epoch: frames of the training episodes; on average where episodes have weights.
        per_dataset: frames of each dataset that are trained on.
        identity: what determines the stream of rows; a resumed run must have the same.
        rates: of a row, by the names of their rates in metrics.jsonl: camera frames, and bytes out of the read task.
        stored_bytes: of a row, were its frames not fitted into another size; None where they are not, or differ among
            datasets.
        cached_bytes: all decoded frames of an epoch, which `reading.frame_cache` would hold.
        distinct_frames: how many those are, of each camera.
        epoch_ends: where epochs end in the stream, unless all have equal lengths.
        weights: of all frames of the dataset in the loss, float32; None where all weigh the same.
        returns: of all frames, float32, for a value function to learn; None for a policy.
        positive: whether a frame's prompt says that its advantage is positive, bool; None where prompts say nothing.
        rename_map: dataset key -> policy key.
        described: what is left of each dataset's training episodes, as lines; empty where all frames are.
    """

    metas: tuple[DatasetMetadata, ...]
    train_episodes: tuple[np.ndarray, ...]
    eval_episodes: tuple[np.ndarray, ...]
    selection: Selection
    features: Features
    order: Order
    reading: Reading
    per_epoch: int
    per_dataset: tuple[int, ...]
    identity: dict[str, Any]
    rates: dict[str, int]
    stored_bytes: int | None = None
    cached_bytes: int = 0
    distinct_frames: int = 0
    epoch_ends: tuple[int, ...] = ()
    weights: np.ndarray | None = None
    returns: PerFrame | None = None
    positive: PerFrame | None = None
    rename_map: Mapping[str, str] = field(default_factory=dict)
    described: tuple[tuple[str, ...], ...] = ()

    def padding(self) -> tuple[int, int, int, float]:
        """Steps of an action chunk; how many of how many training episodes are shorter; their steps of chunks beyond
        the ends of episodes, as a share of all.
        """
        chunk = 1 + round(max(self.features.delta_timestamps.get("action", (0.0,))) * self.metas[0].fps)
        count = short = padded = frames = 0
        for number, (meta, episodes) in enumerate(zip(self.metas, self.train_episodes, strict=True)):
            if meta.without_actions:
                continue
            length, step = meta.episode_length[episodes], self.window_step(number)
            beyond = (chunk - 1) * step  # frames of an episode's end whose chunk does not fit, the last first
            lacking = np.append(0, np.cumsum(chunk - 1 - np.arange(beyond) // step))
            short, padded = short + int((length <= beyond).sum()), padded + lacking[np.minimum(length, beyond)].sum()
            count, frames = count + len(length), frames + length.sum()
        return chunk, short, count, padded / (frames * chunk)

    def window_step(self, dataset: int) -> int:
        """Return how many frames of a dataset lie between two actions of a chunk."""
        return 1 if self.features.window_steps is None else self.features.window_steps[dataset]

    def of_datasets(self, numbers: Sequence[int]) -> Rows:
        """The rows of a robot's datasets alone; of some of them without padding, weights or labels."""
        if len(numbers) == len(self.metas):
            return self

        def pick[T](column: Sequence[T]) -> tuple[T, ...]:
            return tuple(column[number] for number in numbers)

        metas, features, selection = pick(self.metas), self.features, self.selection
        rows_per_source = self.identity["rows_per_source"]  # a single number for datasets without weights
        rates = self.metas[0].fps, metas[0].fps
        deltas = {
            key: [round(second * rates[0]) / rates[1] for second in seconds]
            for key, seconds in features.delta_timestamps.items()
            if key in metas[0].features
        }
        robot_features = replace(
            features,
            camera_keys=[key for key in features.camera_keys or () if key in metas[0].features],
            columns=[key for key in features.columns or () if key in metas[0].features],
            delta_timestamps=deltas,
            padded=False,
            window_steps=None if features.window_steps is None else pick(features.window_steps),
        )
        chosen = replace(
            selection,
            episodes=None if selection.episodes is None else pick(selection.episodes),
            frame_ranges=None if selection.frame_ranges is None else pick(selection.frame_ranges),
            weights=None if selection.weights is None else pick(selection.weights),
        )
        return replace(
            self,
            metas=metas,
            train_episodes=pick(self.train_episodes),
            eval_episodes=pick(self.eval_episodes),
            selection=chosen,
            features=robot_features,
            per_dataset=pick(self.per_dataset),
            identity={
                **self.identity,
                "rows_per_source": rows_per_source if selection.weights is None else pick(rows_per_source),
            },
            described=pick(self.described) if self.described else (),
            weights=None,
            positive=None,
        )

    @property
    def camera_keys(self) -> tuple[str, ...]:
        """The cameras that are decoded, by dataset key."""
        return tuple(self.features.camera_keys or ())

    @property
    def block_rows(self) -> int:
        """Rows of a block of training data."""
        return self.order.block_rows or 1

    @property
    def image_size(self) -> tuple[int, int] | None:
        """(height, width) that frames are fitted into where they are decoded; None: as stored."""
        size = self.features.image_size
        return None if size is None else (size[0], size[1])

    @property
    def frames(self) -> list[tuple[int, int]]:
        """(height, width) of each camera's frames, as they reach a training process."""
        features = {key: feature for meta in reversed(self.metas) for key, feature in meta.features.items()}
        shapes = [frame_of(features[key], self.image_size)[0] for key in self.camera_keys]
        return [(height, width) for height, width, _ in shapes]

    @property
    def last_row(self) -> int:
        """Return where the run's stream of rows ends."""
        assert self.order.stream is not None
        return self.order.stream[1]

    @property
    def positive_share(self) -> float | None:
        """Share of the frames of the training episodes whose advantage is positive; None where there are no labels."""
        if self.positive is None:
            return None
        counts = np.zeros(2, np.int64)
        for number, (meta, chosen) in enumerate(zip(self.metas, self.train_episodes, strict=True)):
            trained = np.zeros(meta.num_episodes, bool)
            trained[chosen] = True
            index = np.flatnonzero(np.repeat(trained, meta.episode_length))
            positive = self.positive({"dataset_index": np.full(len(index), number), "index": index})
            counts += positive.sum(), len(positive)
        return float(counts[0] / counts[1])

    @property
    def any_held_out(self) -> bool:
        return any(len(episodes) for episodes in self.eval_episodes)

    def drawn(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Return how the simulator drew the pictures of these datasets; empty where they come from none, or differ."""
        first, *rest = (how_drawn(self.metas[number]) for number in numbers)
        return first if all(other == first for other in rest) else {}

    # ---- reading ----------------------------------------------------------------------------------------------------

    def source(
        self,
        stream: tuple[int, int] | None = None,
        prepare: Callable[[Columns], Columns] | None = None,
        prepared_bytes: int | None = None,
    ) -> LeRobotDatasource:
        """The datasource of the training rows: positions `stream` of the run's stream, all of it when None.

        It does not check that files exist: `resolve` did, and where an error is reported, a store that hangs must not
        be asked.
        """
        order = self.order if stream is None else replace(self.order, stream=stream)
        reading = replace(self.reading, prepare=prepare, prepared_bytes=prepared_bytes, check_files=False)
        return LeRobotDatasource(self.metas, self.selection, self.features, order, reading)

    @property
    def reader(self) -> Callable[..., LeRobotDatasource]:
        """Return `source` for read tasks, which need no weights of the loss."""
        return replace(self, weights=None).source

    def held_out(self, check_files: bool = False) -> LeRobotDatasource:
        """The datasource of the held-out episodes, in stored order."""
        reading = replace(self.reading, skip_log=None, check_files=check_files)
        return LeRobotDatasource(self.metas, Selection(episodes=self.eval_episodes), self.features, Order(), reading)

    @property
    def episodes(self) -> tuple[np.ndarray, ...]:
        """Return all episodes of the run by dataset, those held out among them: int64, ascending."""
        both = zip(self.train_episodes, self.eval_episodes, strict=True)
        return tuple(np.union1d(train, held_out) for train, held_out in both)

    def in_stored_order(
        self, prepare: Callable[[Columns], Columns] | None = None, prepared_bytes: int | None = None
    ) -> LeRobotDatasource:
        """The datasource of all frames of `episodes`, each once."""
        reading = replace(self.reading, skip_log=None, prepare=prepare, prepared_bytes=prepared_bytes)
        return LeRobotDatasource(self.metas, Selection(episodes=self.episodes), self.features, Order(), reading)

    def feature_store(
        self, cache: FeatureCache, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype, made_by: str
    ) -> FeatureStore:
        """The features of the rows' frames, of the cameras that are decoded; arguments as for `FeatureStore`."""
        cameras = {name: key for name, key in self.cameras.items() if name in shapes}
        camera_shapes = {name: shapes[name] for name in cameras}
        return FeatureStore(cache, self.metas, cameras, self._decoding, camera_shapes, dtype, made_by)

    @property
    def cameras(self) -> dict[str, str]:
        """Return what each camera of a batch is called in the datasets."""
        return {self.rename_map.get(key, key): key for key in self.camera_keys}

    @property
    def _decoding(self) -> Decoding:
        return Decoding(
            tolerance_s=self.features.tolerance_s,
            threads=max(1, round(self.reading.num_cpus)),
            image_size=self.image_size,
            frame_cache=self.reading.frame_cache,
        )

    # ---- the plan ---------------------------------------------------------------------------------------------------

    def epochs_of(self, positions: np.ndarray) -> np.ndarray:
        """The epochs of positions of the run's stream, int64."""
        if self.epoch_ends:
            return np.searchsorted(self.epoch_ends, positions, side="right")
        return positions // self.per_epoch

    def in_words(self, first: int, last: int) -> str:
        """Return the rows at stream positions [first, last), as ranges of `index` of each dataset's root.

        Computed from the plan alone, which every batch was checked against.
        """
        plan = self.source((first, last)).plan
        rows_by_dataset: dict[int, set[int]] = {}
        for window in plan.slices(first, last):
            segment, index = window.rows()
            datasets = plan.episodes.dataset_index[window.episode[segment]]
            for dataset, row in zip(datasets.tolist(), index.tolist(), strict=True):
                rows_by_dataset.setdefault(dataset, set()).add(row)
        texts = []
        for dataset, rows in sorted(rows_by_dataset.items()):
            index = np.array(sorted(rows))
            ranges = np.split(index, np.flatnonzero(np.diff(index) > 1) + 1)
            ends = ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in ranges)
            texts.append(f"{self.metas[dataset].root}: {ends}")
        return "; ".join(texts)

    def held_out_rows(self, limit: int) -> HeldOutRows:
        """Return all held-out rows, or at most `limit` (0: all), shared among the tasks and evenly spaced in each.

        Of every task at least one. `lerobot-train` (0.6.1) takes as many from the front of each task, which may all
        belong to the beginning of one episode.
        """
        tasks: dict[str, int] = {}
        task_numbers, lengths, datasets = [], [], []
        for number, (meta, episodes) in enumerate(zip(self.metas, self.eval_episodes, strict=True)):
            datasets += [number] * len(episodes)
            for episode in episodes.tolist():
                task_numbers.append(tasks.setdefault((meta.episode_tasks[episode] or ("",))[0], len(tasks)))
                lengths.append(int(meta.episode_length[episode]))
        task, dataset = (np.repeat(np.array(column, np.int64), lengths) for column in (task_numbers, datasets))
        positions = np.arange(len(task))
        if limit:
            task_rows = [np.flatnonzero(task == number) for number in range(len(tasks))]
            chosen = [rows[evenly_spaced(len(rows), max(1, limit // len(tasks)))] for rows in task_rows]
            positions = np.sort(np.concatenate(chosen))
        return HeldOutRows(positions, task[positions], tuple(tasks), len(task), dataset[positions])
