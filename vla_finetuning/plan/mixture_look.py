"""Compare the datasets of a mixture without a policy, for `show_dataset`: tables, and mismatches."""

from __future__ import annotations

from collections.abc import Sequence

from vla_finetuning.data.metadata import CAMERA_DTYPES, DatasetMetadata
from vla_finetuning.options.mixture import Member, members, robots
from vla_finetuning.options.programs import Config
from vla_finetuning.plan.datasets import Datasets, load_datasets
from vla_finetuning.plan.matching import by_robot, check_rates, window_step
from vla_finetuning.plan.mixture import check_ranges, check_same_features, unify_order
from vla_finetuning.plan.names import chosen_cameras
from vla_finetuning.policies.matching import aligned

VECTORS = ("observation.state", "action")
# Vectors that policies are trained on.
TRAINED = (*VECTORS, "observation.environment_state")


def look_at_mixture(config: Config) -> tuple[list[str], list[str]]:
    """Tabulate the datasets of `--dataset.mixture`, and list what a run would refuse of each robot; both as lines."""
    all_members = members(config.dataset.mixture)
    metas = load_datasets(config, all_members)
    texts = [describe_texts(meta) for meta in metas if meta.without_actions]
    entries = [(member, meta) for member, meta in zip(all_members, metas, strict=True) if not meta.without_actions]
    if not entries:
        raise ValueError("; ".join(texts))
    mismatches = []
    for robot in robots(tuple(member for member, _ in entries)):
        try:
            _check_group(config, [(member, meta) for member, meta in entries if robot in ("", member.robot)])
        except ValueError as error:
            mismatches.append(f"{f'robot {robot}: ' if robot else ''}{error}")
    return [*_datasets(entries), "", *_cameras(entries), "", *_dimensions(entries), *texts], mismatches


def describe_texts(meta: DatasetMetadata) -> str:
    """Return a line on a dataset without actions."""
    return (
        f"{meta.root}: no actions: {meta.total_episodes:,} episodes, {meta.total_frames:,} frames with the texts "
        f"{', '.join(meta.text_keys)}, which train beside datasets with actions (--dataset.mixture, "
        "--train.text_targets)"
    )


def _name(meta: DatasetMetadata) -> str:
    return meta.root.rstrip("/").rpartition("/")[2]


def tabulate(
    head: str, listed: Sequence[Member], metas: Sequence[DatasetMetadata], cells: Sequence[tuple[str, ...]]
) -> list[str]:
    """Tabulate datasets: name, robot, the columns named in `head`, and the shapes of state and action."""
    lines: list[tuple[str, ...]] = [("dataset", "robot", *head.split(), "state", "action")]
    for member, meta, middle in zip(listed, metas, cells, strict=True):
        shapes = ("x".join(map(str, meta.features[key].shape)) if key in meta.features else "-" for key in VECTORS)
        lines.append((_name(meta), member.robot or "-", *middle, *shapes))
    return aligned(lines)


def _datasets(entries: Sequence[tuple[Member, DatasetMetadata]]) -> list[str]:
    cells = [
        (f"{member.weight:g}", f"{m.total_episodes:,}", f"{m.total_frames:,}", str(m.fps), str(len(m.tasks)))
        for member, m in entries
    ]
    listed, metas = zip(*entries, strict=True)
    return tabulate("weight episodes frames fps tasks", listed, metas, cells)


def _cameras(entries: Sequence[tuple[Member, DatasetMetadata]]) -> list[str]:
    """Tabulate the camera that each dataset has for each of the policy's cameras."""
    by_camera: dict[str, dict[int, str]] = {}
    for number, (member, meta) in enumerate(entries):
        for key in chosen_cameras(meta, member.camera_keys):
            feature = meta.features[key]
            text = f"{feature.key.rpartition('.')[2]} {'x'.join(map(str, feature.shape))}"
            by_camera.setdefault(key, {})[number] = text
    columns = range(len(entries))
    lines = [(camera, *(cells.get(number, "-") for number in columns)) for camera, cells in sorted(by_camera.items())]
    return aligned([("camera", *(_name(meta) for _, meta in entries)), *lines])


def _dimensions(entries: Sequence[tuple[Member, DatasetMetadata]]) -> list[str]:
    lines = []
    for key in VECTORS:
        for member, meta in entries:
            if key in meta.features:
                names = member.orders().get(key) or meta.features[key].names or ["without names"]
                lines.append((key, _name(meta), ", ".join(names)))
    return aligned(lines) if lines else []


def _check_group(config: Config, group: Sequence[tuple[Member, DatasetMetadata]]) -> None:
    """Refuse datasets of one robot that do not match, as a run would."""
    all_members, metas = zip(*group, strict=True)
    check_rates(metas, [window_step(meta, member.fps) for member, meta in group])
    (robot_datasets,) = by_robot(Datasets(metas, all_members))
    keys = [key for key in robot_datasets.features if key in (*robot_datasets.metas[0].camera_keys, *TRAINED)]
    check_same_features(robot_datasets.metas, keys)
    metas = unify_order(robot_datasets.metas, keys, config.dataset.dimension_map)
    for key in (key for key in keys if metas[0].features[key].dtype not in CAMERA_DTYPES):
        shapes = {meta.features[key].shape: _name(meta) for meta in metas}
        if len(shapes) > 1:
            raise ValueError(", ".join(f"{name}: {key} has {shape}" for shape, name in shapes.items()))
        check_ranges(metas, [key])
