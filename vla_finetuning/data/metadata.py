"""Read and check the metadata of a LeRobot dataset: features, tasks, statistics and the location of each episode.

`load_metadata` is the entry point; it decodes no frame and starts no Ray. Files are not trusted: `paths` checks every
path, and every number is checked before use. `metadata_v3` reads the tables of v3.0 (LeRobot 0.6.1,
`lerobot/datasets/dataset_metadata.py`), and `metadata_v2` reads the tables of older versions.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from vla_finetuning.buckets.store import StorageError, within
from vla_finetuning.columns import SUBTASK
from vla_finetuning.data import metadata_v2, metadata_v3
from vla_finetuning.data.dataset import (
    CAMERA_DTYPES,
    COUNTED_FEATURES,
    DTYPES,
    FRAME_FEATURES,
    NUMERIC_DTYPES,
    DatasetMetadata,
    Feature,
    Stats,
    parse_stats,
    shorten,
)
from vla_finetuning.data.limits import MAX_EPISODES, MAX_INFO_BYTES, MAX_ROW_BYTES, MAX_STATS_BYTES
from vla_finetuning.data.paths import INFO_PATH, assign_files, check_inside, first_row_in_file, read_whole
from vla_finetuning.data.safe_parquet import open_parquet
from vla_finetuning.data.storage import StoragePolicy, connect
from vla_finetuning.environment import FIRST_ANSWER_TIMEOUT_S
from vla_finetuning.options.credentials import refuse_credentials
from vla_finetuning.options.environment import ENVIRONMENT_NAME

STATS_PATH = "meta/stats.json"

_MAX_FPS = 100_000
# LeRobot's default (`VideoEncoderConfig.g`).
KEY_FRAME_ROWS = 2


def key_frame_rows(features: Iterable[Feature]) -> int:
    """Return the smallest distance between key frames among the videos, in frames.

    Videos in which every frame is a key frame do not count. A video without a stated distance has LeRobot's default.
    The result is 1 without videos.
    """
    stated = [feature.info.get("video.g") for feature in features if feature.dtype == "video"]
    apart = [n if type(n) is int and n > 0 else KEY_FRAME_ROWS for n in stated]
    return min((n for n in apart if n > 1), default=1)


def load_metadata(
    root: str | Path, *, storage_options: dict | None = None, storage_policy: StoragePolicy | None = None
) -> DatasetMetadata:
    """Read and check the metadata of the LeRobot dataset at `root`. Runs on the driver.

    Read `meta/` only; `dataset_files.check_files` checks that the data and video files exist.

    `root` is a local folder or a URL (`s3://`, `gs://`, `az://`), and `storage_options` are obstore's.

    Raises:
        FileNotFoundError: `root` does not exist, is not a LeRobot dataset, or lacks a file of `meta/`.
        ValueError: another version than v3.0, v2.1 or v2.0, or a file of `meta/` that is corrupt, contradicts another,
            or points outside the root.
        OSError: `root` cannot be read (credentials, permissions, network).
    """
    fs, base, root = _open_root(root, storage_options, storage_policy or StoragePolicy())
    with _naming_dataset(root):
        info = _read_json(fs, base, INFO_PATH, MAX_INFO_BYTES)
        version = _check_version(info)
        if (storage := info.get("storage_format")) not in (None, "parquet"):
            raise ValueError(
                f"is stored as {storage!r:.50}, which is not read here. Look for the same dataset as parquet and mp4 "
                "files; else read it with a LeRobot that knows Lance, and write its frames with LeRobotDataset.create"
            )
        if info.get("total_episodes") == 0:
            raise ValueError(
                f"no episode has been recorded yet ({INFO_PATH}: total_episodes is 0), or none was saved: record "
                "one or more (lerobot-record; save_episode and finalize of LeRobotDataset)"
            )
        if version in metadata_v2.VERSIONS:
            info = metadata_v2.TEMPLATES | info
        features, not_read = _parse_features(info)
        features |= _subtasks(fs, base, features, not_read)
        fps = _parse_fps(info)
        robot_type = info.get("robot_type")
        if robot_type is not None and not isinstance(robot_type, str):
            robot_type = None
        video_keys = [key for key, feature in features.items() if feature.dtype == "video"]
        stats = _read_stats(fs, base, version)
        tables = tables_of(version)
        tasks = tables.read_tasks(fs, base)
        table = tables.read_episodes(fs, base, video_keys)
        known = set(tasks.values())
        # Equal tasks of millions of episodes stay one object.
        known_tasks = {texts: tuple(text for text in texts if text in known) for texts in set(table.tasks)}
        episode_tasks = [known_tasks[texts] for texts in table.tasks]
        episodes, episode_tasks = _in_order(info, table.columns, episode_tasks, table.broken)
        num_episodes, length = len(episode_tasks), episodes["length"]

        data_files, data_file = assign_files(info, episodes)
        video_files, video_file, video_start_s = {}, {}, {}
        for key in video_keys:
            video_files[key], video_file[key] = assign_files(info, episodes, key)
            video_start_s[key] = episodes[f"videos/{key}/from_timestamp"]
        all_video_files = [path for key in video_keys for path in video_files[key]]
        if len(set(all_video_files)) != len(all_video_files):
            raise ValueError(
                f"{INFO_PATH}: video_path {info.get('video_path')!r} gives two cameras the same file; "
                "it must hold {video_key}"
            )
        check_inside(fs, base, [*data_files, *all_video_files])
        _place_broken(fs, base, data_files, data_file, length, table.broken.get("data", {}))

    return DatasetMetadata(
        root=root,
        fs=fs,
        base=base,
        codebase_version=version,
        fps=fps,
        robot_type=robot_type,
        features=features,
        tasks=tasks,
        stats=stats,
        episode_index=np.arange(num_episodes, dtype=np.int64),
        episode_length=length,
        episode_start=np.cumsum(length) - length,
        episode_tasks=episode_tasks,
        data_files=data_files,
        episode_data_file=data_file,
        episode_data_row=first_row_in_file(data_file, length),
        video_files=video_files,
        episode_video_file=video_file,
        episode_video_start_s=video_start_s,
        first_episode=int(table.columns["episode_index"].min()),
        broken=table.broken,
        not_read=tuple(not_read),
    )


def tables_of(version: str) -> Any:
    """Return the module that reads the tables of a version of the format: `metadata_v2` or `metadata_v3`."""
    return metadata_v2 if version in metadata_v2.VERSIONS else metadata_v3


def rename_features(meta: DatasetMetadata, names: Mapping[str, str]) -> DatasetMetadata:
    """Rename the features by `names`, `{key: name}`. Raises ValueError if two would have the same name."""
    for name in names.values():
        same = [key for key in meta.features if names.get(key, key) == name]
        if len(same) > 1:
            raise ValueError(f"dataset {meta.root}: {same} would all be called {name!r}: rename the others too")
    # Statistics under a new name without a feature are left over from an earlier conversion.
    stats = {key: values for key, values in meta.stats.items() if key in meta.features or key not in names.values()}
    meta = replace(meta, stats=stats)
    return _select_features(meta, {key: names.get(key, key) for key in (*meta.features, *meta.stats, *meta.broken)})


def without_features(meta: DatasetMetadata, keys: Collection[str]) -> DatasetMetadata:
    """Return the dataset without the features `keys`."""
    return _select_features(meta, {key: key for key in (*meta.features, *meta.stats, *meta.broken) if key not in keys})


def _select_features(meta: DatasetMetadata, names: Mapping[str, str]) -> DatasetMetadata:
    """Return the dataset with the features `{key: name}` renamed, and without all other features."""
    by_key = ("features", "stats", "video_files", "episode_video_file", "episode_video_start_s", "broken")
    tables: dict[str, Any] = {table: getattr(meta, table) for table in by_key}
    for table, values in tables.items():
        tables[table] = {names[key]: value for key, value in values.items() if key in names}
    return replace(meta, **tables)


def join_features(meta: DatasetMetadata, keys: Sequence[str], name: str) -> DatasetMetadata:
    """Concatenate the vectors `keys` to one float32 vector `name`, in the order of `keys`.

    Statistics are concatenated where all vectors have them. A dimension without a name is named after its feature.

    Raises:
        ValueError: a feature is missing, repeated or not a numeric vector, or another feature is named `name`.
    """
    label = f"dataset {meta.root}"
    if twice := sorted({key for key in keys if list(keys).count(key) > 1}):
        raise ValueError(f"{label}: {twice} would be joined twice into {name!r}")
    if name in meta.features and name not in keys:
        raise ValueError(
            f"{label}: it has a feature {name!r} beside {', '.join(keys)}; name it among those to be joined"
        )
    for key in keys:
        feature = meta.features.get(key)
        if feature is None:
            raise ValueError(f"{label}: no feature {key!r} to join into {name!r}; it has {sorted(meta.features)}")
        if key in FRAME_FEATURES or feature.dtype not in NUMERIC_DTYPES or len(feature.shape) != 1:
            raise ValueError(f"{label}: {key!r} cannot be joined into {name!r}: it is no vector that a robot reports")
    joined = tuple(meta.features[key] for key in keys)
    names: list[str] = []
    for key, f in zip(keys, joined, strict=True):
        names += [key] if f.names is None and f.shape == (1,) else dimension_names(meta, key)
    feature = Feature(name, "float32", (len(names),), tuple(names), False, {}, joined=joined)
    feature_stats = [meta.stats.get(key, {}) for key in keys]
    stats = {
        n: feature_stats[0][n] if n == "count" else np.concatenate([np.ravel(stats[n]) for stats in feature_stats])
        for n in feature_stats[0]
        if all(n in stats for stats in feature_stats)
    }
    replaced = {*keys, name}
    return replace(
        meta,
        features={name: feature, **{key: f for key, f in meta.features.items() if key not in replaced}},
        stats={**{key: s for key, s in meta.stats.items() if key not in replaced}, **({name: stats} if stats else {})},
    )


def reorder_dimensions(
    meta: DatasetMetadata, orders: Mapping[str, tuple[int, ...]], names_of: DatasetMetadata
) -> DatasetMetadata:
    """Reorder the dimensions of vectors in rows, and name them as in `names_of`; files and `stats` keep their order.

    `orders` has, for each feature, the index of each new dimension in the current row.
    """
    features = dict(meta.features)
    for key, order in orders.items():
        before = features[key].order
        order = order if before is None else tuple(before[entry] for entry in order)
        features[key] = replace(features[key], order=order, names=names_of.features[key].names)
    return replace(meta, features=features)


def dimension_names(meta: DatasetMetadata, key: str) -> list[str]:
    """Return the names of the dimensions of `key`, or `key[i]` if they do not match its number of dimensions."""
    names, width = meta.features[key].names or (), meta.features[key].shape[0]
    return list(names) if len(names) == width else [f"{key}[{i}]" for i in range(width)]


def check_readable(
    meta: DatasetMetadata, episodes: np.ndarray, camera_keys: Sequence[str] | None, remedy: Callable[[list[int]], str]
) -> None:
    """Raise ValueError if chosen episodes cannot be read, with the reason.

    `camera_keys` are the cameras to read, None for all. `remedy` words how to leave out the given episodes.
    """
    places = ["data", *(meta.video_keys if camera_keys is None else camera_keys)]
    chosen = set(episodes.tolist())
    broken = {
        n: reason for place in reversed(places) for n, reason in meta.broken.get(place, {}).items() if n in chosen
    }
    if not broken:
        return
    numbers = sorted(broken)
    named = "episode" if len(numbers) == 1 else f"{len(numbers)} of {len(chosen)} episodes cannot be read: episode"
    raise ValueError(
        f"dataset {meta.root}: {named} {numbers[0]} {broken[numbers[0]]}. Copy the dataset again, or leave out what "
        f"is broken: {remedy(numbers)}"
    )


def episode_ranges(numbers: Sequence[int]) -> str:
    """Format ascending episode numbers in the syntax of flags: 3,7,20:30."""
    ends = np.flatnonzero(np.diff(numbers) != 1) + 1
    runs = [run.tolist() for run in np.split(np.asarray(numbers), ends)]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}:{run[-1] + 1}" for run in runs)


def how_drawn(meta: DatasetMetadata) -> dict[str, Any]:
    """Return the rendering settings of a dataset recorded in a simulator (record.py), or {} if unknown."""
    path = f"meta/{ENVIRONMENT_NAME}"
    with _naming_dataset(meta.root):
        if not meta.fs.exists(f"{meta.base}/{path}"):
            return {}
        rendering = _read_json(meta.fs, meta.base, path, MAX_INFO_BYTES).get("drawn")
        if not isinstance(rendering, dict):
            raise ValueError(f"{path}: drawn is {rendering!r:.100}, expected a JSON object")
    return rendering


def read_modality(meta: DatasetMetadata) -> dict[str, dict[str, str]]:
    """Read the columns in GR00T's meta/modality.json, `{"state" | "action" | "video": {name: column}}`.

    The columns are empty without that file. Source: `gr00t/data/schema.py`, where `original_key` has these defaults.
    """
    path, base = "meta/modality.json", meta.base
    defaults = {"state": "observation.state", "action": "action", "video": "observation.images.{}"}
    with _naming_dataset(meta.root):
        raw = _read_json(meta.fs, base, path, MAX_INFO_BYTES) if meta.fs.exists(f"{base}/{path}") else {}
        modality: dict[str, dict[str, str]] = {}
        for group, default in defaults.items():
            entries = raw.get(group, {})
            if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
                raise ValueError(f"{path}: {group} is {entries!r:.100}, expected an object of objects")
            columns = {name: entry.get("original_key") or default.format(name) for name, entry in entries.items()}
            if any(not isinstance(column, str) for column in columns.values()):
                raise ValueError(f"{path}: an original_key of {group} is no text: {entries!r:.100}")
            modality[group] = columns
    return modality


# --- opening the root, errors -------------------------------------------------------------------------------


def _open_root(
    root: str | Path, storage_options: dict | None, policy: StoragePolicy
) -> tuple[fsspec.AbstractFileSystem, str, str]:
    root = str(root).rstrip("/") or "/"
    refuse_credentials(root, "dataset root")
    with _naming_dataset(root), within(min(FIRST_ANSWER_TIMEOUT_S, policy.timeout_s)):
        try:
            fs, base = connect(root, policy, storage_options)
        except ValueError as error:
            raise ValueError(f"{error}; expected a local folder, s3://, gs:// or az://") from error
        base = base.rstrip("/")
        if not fs.exists(f"{base}/{INFO_PATH}"):
            if not fs.exists(base):
                place = "path" if isinstance(fs, LocalFileSystem) else "bucket, the path and the endpoint"
                raise FileNotFoundError(f"no such folder; check the {place}")
            if not fs.isdir(base):
                raise FileNotFoundError("is a file; give the folder that holds meta/, data/, …")
            names = sorted(str(name).rstrip("/").rpartition("/")[2] for name in fs.ls(base, detail=False))
            raise FileNotFoundError(
                f"not a LeRobot dataset: {INFO_PATH} is missing (found {shorten(names)}); give the folder that holds "
                "meta/, data/ and videos/"
            )
    return fs, base, root


def unreachable(root: str, error: OSError) -> OSError:
    if isinstance(error, StorageError):
        return StorageError(f"dataset {root}: {error}")
    return type(error)(f"dataset {root}: cannot be read: {type(error).__name__}: {error}; check its permissions")


@contextlib.contextmanager
def _naming_dataset(root: str) -> Iterator[None]:
    """Prefix errors with the name of the dataset."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"dataset {root}: {error}") from error.__cause__
    except ValueError as error:
        raise ValueError(f"dataset {root}: {error}") from error.__cause__
    except OSError as error:
        raise unreachable(root, error) from error


def _read_json(fs: fsspec.AbstractFileSystem, base: str, path: str, most_bytes: int) -> dict[str, Any]:
    text = read_whole(fs, base, path, most_bytes)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); restore the file") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


# --- info.json and stats.json -------------------------------------------------------------------------------


def _check_version(info: dict[str, Any]) -> str:
    version = info.get("codebase_version")
    if not isinstance(version, str):
        raise ValueError(f"{INFO_PATH}: codebase_version is {version!r}, expected 'v3.0'")
    number = version.removeprefix("v")
    if f"v{number}" in ("v3.0", *metadata_v2.VERSIONS):
        return f"v{number}"
    raise ValueError(
        f"is in LeRobot's format {version!r:.50}; v3.0, v2.1 and v2.0 are read here: convert an older dataset with "
        "LeRobot's scripts, or update vla-fine-tuning for a newer one"
    )


def _parse_fps(info: dict[str, Any]) -> int:
    fps = info.get("fps")
    if isinstance(fps, float) and fps.is_integer():
        fps = int(fps)
    if type(fps) is not int or not 0 < fps <= _MAX_FPS:
        raise ValueError(f"{INFO_PATH}: fps is {fps!r:.50}, expected a positive whole number")
    return fps


def _parse_features(info: dict[str, Any]) -> tuple[dict[str, Feature], list[str]]:
    """Return the features of rows, and a line for each feature that is not read."""
    raw = info.get("features")
    if not isinstance(raw, dict):
        raise ValueError(f"{INFO_PATH}: features is {raw!r:.50}, expected an object of features")
    features, not_read = {}, []
    for key, value in raw.items():
        try:
            features[key] = _parse_feature(key, value)
        except ValueError as error:
            if _is_essential(key, value):
                raise
            not_read.append(str(error))
    absent = [key for key in FRAME_FEATURES if key not in features]
    if missing := [key for key in absent if key not in COUNTED_FEATURES]:
        raise ValueError(
            f"{INFO_PATH}: features lacks {missing}, by which a row's episode, time and task are known: add the entry "
            "where the data files have the column, else write the dataset again with LeRobot"
        )
    features |= {key: Feature(key, "int64", (1,), None, False, {}, counted=True) for key in absent}
    size = {key: _row_bytes(feature) for key, feature in features.items()}
    if sum(size.values()) > MAX_ROW_BYTES:
        largest = max(size, key=lambda key: size[key])
        raise ValueError(
            f"{INFO_PATH}: a row has {sum(size.values()) / 2**20:,.0f} MiB, more than the {MAX_ROW_BYTES / 2**20:,.0f} "
            f"MiB that it may; repair the shapes, the largest is {largest!r:.100} of shape {features[largest].shape}"
        )
    return features, not_read


def _row_bytes(feature: Feature) -> int:
    """Return the bytes of a row of `feature` in memory, frames decoded."""
    if feature.dtype in CAMERA_DTYPES:
        return math.prod(feature.shape) * (4 if feature.is_depth else 1)
    return math.prod(feature.shape) * (np.dtype(feature.dtype).itemsize if feature.dtype in NUMERIC_DTYPES else 1)


def _subtasks(
    fs: fsspec.AbstractFileSystem, base: str, features: Mapping[str, Feature], not_read: list[str]
) -> dict[str, Feature]:
    """Return the feature SUBTASK, with texts from LeRobot 0.6.1's annotations or from `subtask_index`, if any."""
    if SUBTASK in features:
        return {}
    if (annotations := features.get("language_persistent")) is not None:
        return {SUBTASK: replace(annotations, dtype="string", style=SUBTASK)}
    if "subtask_index" in features:
        try:
            texts = metadata_v3.read_subtasks(fs, base)
        except (ValueError, FileNotFoundError) as error:
            not_read.append(f"the texts of 'subtask_index', which rows have as a number: {error}")
            return {}
        return {SUBTASK: replace(features["subtask_index"], dtype="string", texts=texts)}
    return {}


def _is_name(key: str) -> bool:
    return bool(key) and key not in (".", "..") and key.isprintable() and not set(key) & set("/\\")


def _is_essential(key: str, raw: Any) -> bool:
    """Return whether a policy uses the feature by default: a camera or one of LeRobot's standard names.

    A later LeRobot may add features with unknown dtypes; these are not essential.
    """
    dtype = raw.get("dtype") if isinstance(raw, dict) else None
    if not _is_name(key) or isinstance(dtype, str) and dtype not in DTYPES:
        return False
    return dtype in CAMERA_DTYPES or key in (*FRAME_FEATURES, "action") or key.startswith("observation.")


def _parse_feature(key: str, raw: Any) -> Feature:
    label = f"{INFO_PATH}: feature {key!r:.100}"
    if not _is_name(key):
        raise ValueError(f"{label}: its name is not printable or has slashes")
    if not isinstance(raw, dict):
        raise ValueError(f"{label} is {raw!r:.50}, expected an object")
    dtype, shape, info = raw.get("dtype"), raw.get("shape"), raw.get("info")
    if dtype not in DTYPES:
        raise ValueError(f"{label}: dtype is {dtype!r:.50}, which is not read here")
    if not isinstance(shape, list) or not 1 <= len(shape) <= 5 or any(type(n) is not int or n < 1 for n in shape):
        raise ValueError(f"{label}: shape is {shape!r:.100}, expected 1 to 5 positive whole numbers")
    if dtype in CAMERA_DTYPES and len(shape) != 3:
        raise ValueError(f"{label}: shape is {shape}, expected three numbers for a camera (height, width, 3)")
    if key in FRAME_FEATURES and (dtype not in NUMERIC_DTYPES or shape != [1]):
        raise ValueError(f"{label}: dtype is {dtype}, shape is {shape}, expected numbers of shape [1]")
    video_info = raw.get("video_info")  # before LeRobot v2.1
    if not isinstance(info or {}, dict) or not isinstance(video_info or {}, dict):
        raise ValueError(f"{label}: info is {info or video_info!r:.50}, expected an object")
    flags = [(info or {}).get("is_depth_map"), (info or {}).get("video.is_depth_map")]
    flags.append((video_info or {}).get("video.is_depth_map"))
    return Feature(key, dtype, tuple(shape), _parse_names(label, raw.get("names")), any(flags), info or {})


def _parse_names(label: str, names: Any) -> tuple[str, ...] | None:
    """Flatten the forms that datasets use: a list, `{"motors": [...]}`, `{"axis_0": 0}`, numbers, nested lists."""
    if names is None:
        return None
    if not isinstance(names, str | list | dict):
        raise ValueError(f"{label}: names is {names!r:.50}, expected a list of strings")
    flat: list[str] = []
    stack = [names]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            part = [key if value is None or isinstance(value, int) else value for key, value in part.items()]
        if isinstance(part, list):
            stack += reversed(part)
        elif part is not None:
            flat.append(str(part))
    return tuple(flat) or None


def _read_stats(fs: fsspec.AbstractFileSystem, base: str, version: str) -> Stats:
    """Read the statistics of all rows, or {} without any."""
    if fs.exists(f"{base}/{STATS_PATH}"):
        return parse_stats(_read_json(fs, base, STATS_PATH, MAX_STATS_BYTES))
    if version in metadata_v2.VERSIONS and fs.exists(f"{base}/{metadata_v2.STATS_PATH}"):
        return metadata_v2.read_stats(fs, base)
    return {}


def _place_broken(
    fs: fsspec.AbstractFileSystem,
    base: str,
    data_files: Sequence[str],
    data_file: np.ndarray,
    length: np.ndarray,
    broken: Collection[int],
) -> None:
    """Assign episodes with rows and an unknown data file to the file of their neighbours, in place.

    Between two files, the row count in the footer of the first decides.
    """
    present = np.flatnonzero(length)
    is_broken = np.isin(present, list(broken))
    known = present[~is_broken]
    for nth in np.flatnonzero(is_broken).tolist():
        episode, before = present[nth], data_file[present[max(0, nth - 1)]]
        following = np.searchsorted(known, episode)
        after = data_file[known[following]] if following < len(known) else before
        data_file[episode] = before
        if before != after and nth:
            path = data_files[before]
            with open_parquet(fs, f"{base}/{path}", name=path) as file:
                if length[data_file == before].sum() > file.metadata.num_rows:
                    data_file[episode] = after


def _in_order(
    info: dict[str, Any],
    columns: dict[str, np.ndarray],
    tasks: list[tuple[str, ...]],
    broken: dict[str, dict[int, str]],
) -> tuple[dict[str, np.ndarray], list[tuple[str, ...]]]:
    """Sort the table of episodes by `episode_index`.

    Fill a missing number with the episode before it, in its file, of length 0, and note it in `broken["data"]`.

    Raises:
        ValueError: no episode, a repeated episode, or totals that differ from info.json.
    """
    index = columns["episode_index"]
    order = np.argsort(index, kind="stable")
    if not len(index):
        raise ValueError("meta/episodes holds no episode; record one or more first")
    ordered = index[order]
    if (twice := ordered[1:][np.diff(ordered) == 0]).size:
        raise ValueError(f"meta/episodes: episode {twice[0]} is there twice; copy the dataset again")
    count = int(ordered[-1]) + 1
    if count > MAX_EPISODES:
        raise ValueError(f"meta/episodes: episode number {count - 1:,} is above the limit of {MAX_EPISODES:,} episodes")
    if count > len(index):
        at = np.maximum(np.searchsorted(ordered, np.arange(count), side="right") - 1, 0)
        absent = np.setdiff1d(np.arange(count), ordered)
        columns = {name: column[order][at] for name, column in columns.items()}
        columns["length"][absent] = 0
        gone = set(absent.tolist())
        tasks = [() if episode in gone else tasks[order[at[episode]]] for episode in range(count)]
        broken.setdefault("data", {}).update(dict.fromkeys(absent.tolist(), "is in no file of meta/episodes"))
        if absent[-1] > ordered[0]:
            return columns, tasks
    for key, actual in (("total_episodes", len(index)), ("total_frames", int(columns["length"].sum()))):
        if type(info.get(key)) is not int or info[key] != actual:
            raise ValueError(
                f"{INFO_PATH}: {key} is {info.get(key)!r:.50}, but meta/episodes holds {actual}; "
                "the metadata is incomplete or from two versions: copy the dataset again"
            )
    if count == len(index) and (np.diff(order) < 0).any():
        columns = {name: column[order] for name, column in columns.items()}
        tasks = [tasks[at] for at in order.tolist()]
    return columns, tasks
