"""The training and held-out rows of a run: selection, order, and the datasources that read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lerobot_datasource import LeRobotDatasource
from vla_finetuning.data.metadata import DatasetMetadata, how_drawn
from vla_finetuning.data.options import Features, Order, Reading, Selection
from vla_finetuning.data.plan import evenly_spaced
from vla_finetuning.data.reader import frame_spec
from vla_finetuning.options.mixture import Member

Columns = dict[str, np.ndarray]


class PerFrame:
    """Values of all frames, one array per dataset, found by a batch's `dataset_index` and `index`."""

    def __init__(self, by_dataset: Sequence[np.ndarray]):
        self._values = np.concatenate(by_dataset)
        self._first = np.cumsum([0, *map(len, by_dataset)])

    def __call__(self, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        return self._values[self._first[batch["dataset_index"]] + batch["index"]]


@dataclass(frozen=True)
class HeldOutRows:
    """The rows on which the held-out loss is computed. Arrays are int64 (N,)."""

    positions: np.ndarray  # among the held-out rows in stored order, ascending
    task: np.ndarray  # indices into `tasks`
    tasks: tuple[str, ...]  # the first instruction of each held-out episode
    held_out: int  # number of all held-out rows
    dataset: np.ndarray  # `dataset_index`


@dataclass(frozen=True)
class Rows:
    """The rows of a run. Pickled in flight to training workers."""

    metas: tuple[DatasetMetadata, ...]  # by `dataset_index`
    members: tuple[Member, ...]  # options of each dataset, with its weight in the epoch
    train_episodes: tuple[np.ndarray, ...]  # int64 arrays per dataset
    eval_episodes: tuple[np.ndarray, ...]  # disjoint from `train_episodes`
    # Arguments of the training rows' datasource. The stream of `order` ends with the run's last row.
    selection: Selection
    features: Features
    order: Order
    reading: Reading
    per_epoch: int  # rows of an epoch; the average if episodes have weights
    per_dataset: tuple[int, ...]  # training frames of each dataset
    dropped: int  # number of last frames of each training episode that are no rows
    identity: dict[str, Any]  # JSON that determines the stream of rows; a resumed run must have the same
    rates: dict[str, int]  # camera frames and decoded bytes per row, by the names of their rates in metrics.jsonl
    cached_bytes: int = 0  # bytes of an epoch's decoded frames, for `reading.frame_cache`
    epoch_ends: tuple[int, ...] = ()  # ends of epochs in the stream; empty if all epochs have equal lengths
    weights: np.ndarray | None = None  # float32 (F,), of the dataset's frames in the loss
    returns: PerFrame | None = None  # float32, return of each frame, for a value function
    positive: PerFrame | None = None  # bool, label of each frame for its prompt
    described: tuple[tuple[str, ...], ...] = ()  # lines per dataset on idle frames and weights

    def padding(self) -> tuple[int, int, int, float]:
        """Return a chunk's steps, the numbers of shorter episodes and of all, and the padding's share of all steps."""
        seconds = np.array(self.features.delta_timestamps.get("action", [0.0]))
        offsets = np.rint(seconds * self.metas[0].fps).astype(np.int64)  # also before the frame, for diffusion
        count = short_episodes = padded_steps = frames = 0
        for number, (meta, episodes) in enumerate(zip(self.metas, self.train_episodes, strict=True)):
            if meta.without_actions:
                continue
            length, step = meta.episode_length[episodes], self.window_step(number)
            short_episodes += int((length <= np.ptp(offsets) * step).sum())
            padded_steps += sum(np.minimum(length, abs(offset) * step).sum() for offset in offsets)
            count, frames = count + len(length), frames + length.sum()
        return len(offsets), short_episodes, count, padded_steps / (frames * len(offsets))

    def window_step(self, dataset: int) -> int:
        """Return the frames of a dataset between two actions of a chunk."""
        return 1 if self.features.window_steps is None else self.features.window_steps[dataset]

    def select_datasets(self, numbers: Sequence[int]) -> Rows:
        """Select datasets by number; a proper subset has no padding, weights or labels."""
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
        weights = None
        if selection.weights is not None:
            weights, rows_per_source = pick(selection.weights), pick(rows_per_source)
        return replace(
            self,
            metas=metas,
            members=pick(self.members),
            train_episodes=pick(self.train_episodes),
            eval_episodes=pick(self.eval_episodes),
            selection=Selection(frame_ranges=pick(selection.frame_ranges or ()), weights=weights),
            features=robot_features,
            per_dataset=pick(self.per_dataset),
            identity={**self.identity, "rows_per_source": rows_per_source},
            described=pick(self.described) if self.described else (),
            weights=None,
            positive=None,
        )

    @property
    def camera_keys(self) -> tuple[str, ...]:
        """Return the names of the decoded cameras."""
        return tuple(self.features.camera_keys or ())

    @property
    def block_rows(self) -> int:
        return self.order.block_rows or 1

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Return (height, width) to which read tasks resize frames; None for the stored size."""
        size = self.features.image_size
        return None if size is None else (size[0], size[1])

    @property
    def frames(self) -> list[tuple[int, int]]:
        """Return (height, width) of each camera's frames as they reach a training process."""
        features = {key: feature for meta in reversed(self.metas) for key, feature in meta.features.items()}
        shapes = [frame_spec(features[key], self.image_size)[0] for key in self.camera_keys]
        return [(height, width) for height, width, _ in shapes]

    @property
    def last_row(self) -> int:
        assert self.order.stream is not None
        return self.order.stream[1]

    @property
    def positive_share(self) -> float | None:
        """Return the share of the training episodes' frames with a positive label; None without labels."""
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
        """Return the simulator's rendering options for these datasets; empty if unknown or different."""
        first, *rest = (how_drawn(self.metas[number]) for number in numbers)
        return first if all(other == first for other in rest) else {}

    # ---- reading ----------------------------------------------------------------------------------------------------

    def source(
        self,
        stream: tuple[int, int] | None = None,
        prepare: Callable[[Columns], Columns] | None = None,
        prepared_bytes: int | None = None,
    ) -> LeRobotDatasource:
        """Return the datasource of the training rows at positions `stream` of the run's stream; None for all.

        The datasource does not check that files exist: `resolve` did, and reporting an error must not wait for a store.
        """
        order = self.order if stream is None else replace(self.order, stream=stream)
        reading = replace(self.reading, prepare=prepare, prepared_bytes=prepared_bytes, check_files=False)
        return LeRobotDatasource(self.metas, self.selection, self.features, order, reading)

    @property
    def reader(self) -> Callable[..., LeRobotDatasource]:
        """Return `source` for read tasks, without the weights of the loss."""
        return replace(self, weights=None).source

    def held_out(self, check_files: bool = False) -> LeRobotDatasource:
        """Return the datasource of the held-out episodes, in stored order."""
        reading = replace(self.reading, skip_log=None, check_files=check_files)
        return LeRobotDatasource(self.metas, Selection(episodes=self.eval_episodes), self.features, Order(), reading)

    @property
    def episodes(self) -> tuple[np.ndarray, ...]:
        """Return the training and held-out episodes per dataset: int64, ascending."""
        both = zip(self.train_episodes, self.eval_episodes, strict=True)
        return tuple(np.union1d(train, held_out) for train, held_out in both)

    def in_stored_order(
        self, prepare: Callable[[Columns], Columns] | None = None, prepared_bytes: int | None = None
    ) -> LeRobotDatasource:
        """Return the datasource of all frames of `episodes`, in stored order."""
        reading = replace(self.reading, skip_log=None, prepare=prepare, prepared_bytes=prepared_bytes)
        return LeRobotDatasource(self.metas, Selection(episodes=self.episodes), self.features, Order(), reading)

    # ---- the plan ---------------------------------------------------------------------------------------------------

    def epochs_of(self, positions: np.ndarray) -> np.ndarray:
        """Return the epochs of positions in the run's stream, int64."""
        if self.epoch_ends:
            return np.searchsorted(self.epoch_ends, positions, side="right")
        return positions // self.per_epoch

    def in_words(self, first: int, last: int) -> str:
        """Return the rows at stream positions [first, last) as text: ranges of `index` for each dataset's root.

        Uses only the plan; training has compared every batch with it.
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
        """Return about `limit` held-out rows (0: all): equally many of each task, evenly spaced, and at least one.

        `lerobot-train` (0.6.1) takes them from the front of each task, which may be the beginning of one episode.
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
