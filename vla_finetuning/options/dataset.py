"""Options of the datasets: locations, selection of episodes and frames, normalisation, reading and caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vla_finetuning.environment import FRAME_CACHE_GB, FRAMES_DIR, cache_gb
from vla_finetuning.options.fields import option
from vla_finetuning.options.mixture import members, robots

MissingCameras = Literal["error", "mask"]
OnError = Literal["stop", "skip"]
ENABLED = "dataset.image_transforms.enable"


@dataclass
class ImageTransformOptions:
    """LeRobot's image transforms, for frames that are trained on; done on the device (policies/augment.py)."""

    enable: bool = option(
        False, "Augment training frames with LeRobot's image transforms.", conflicts={"train.augmentation": ""}
    )
    max_num_transforms: int = option(
        3, "Number of transforms applied to each camera of each row, drawn by their weights.", min=1, only_with=ENABLED
    )
    random_order: bool = option(False, "Apply transforms in random order, not that of `tfs`.", only_with=ENABLED)
    tfs: dict[str, Any] = option(
        {},
        "The transforms. Default: LeRobot's.",
        form="""JSON, as '{"dark": {"weight": 1.0, "type": "ColorJitter", "kwargs": {"brightness": [0.5, 0.9]}}}'""",
        only_with=ENABLED,
    )


@dataclass
class DatasetOptions:
    """Datasets and episodes."""

    root: str | None = option(
        None,
        "A LeRobot dataset (v3.0, v2.1 or v2.0): a local folder, s3://, gs:// or az://. Separate several with commas.",
        conflicts={"dataset.repo_id": "", "dataset.mixture": ""},
    )
    repo_id: str | None = option(
        None,
        "A dataset on the Hugging Face Hub. The run's config.json pins its revision.",
        conflicts={"dataset.mixture": ""},
    )
    revision: str | None = option(
        None,
        "Branch, tag or commit of --dataset.repo_id. Default: the tag v3.0, as in LeRobot, else the default branch.",
        requires={"dataset.repo_id": "it names a revision of a dataset on the Hub"},
    )
    mixture: dict[str, float | dict[str, Any]] | str = option(
        {},
        "Datasets and their weights, instead of root. An epoch has rows of each dataset in proportion to its weight, "
        "and as many rows as the datasets together. @FILE: a YAML file, whose members may be of several robots "
        "(docs/robots.md).",
        form="""JSON, as '{"s3://bucket/a": 3, "/data/b": 1}', or @FILE""",
    )
    # A dimension must have the same meaning in every dataset.
    dimension_map: dict[str, dict[str, str]] = option(
        {},
        "The first dataset's names for state and action dimensions that other datasets of a mixture name differently. "
        "Dimensions are ordered by name, as in the first dataset.",
        form="""JSON, as '{"action": {"shoulder": "joint_0"}}'""",
    )
    mixed_ranges: bool = option(
        False,
        "Accept datasets whose values are more than 10 times as large as another's, which usually means different "
        "units.",
    )
    mixture_stats: Literal["weights", "frames"] = option(
        "weights",
        "Weight of each dataset of a mixture in the normalisation statistics: as in training (weights), or by its "
        "number of frames.",
    )
    robot_in_prompt: bool = option(
        False,
        "With several robots: begin each instruction with the robot's name. The robot's client must do the same "
        "(docs/robots.md).",
    )
    statistics: Literal["auto", "exact", "stored", "lerobot"] = option(
        "auto",
        "Normalisation statistics (docs/statistics.md). exact: over all frames of the training episodes, with exact "
        "quantiles. stored: from meta/stats.json. lerobot: the same, and missing ones as LeRobot computes them, with "
        "averaged quantiles. auto: stored if they describe the data, otherwise exact.",
    )
    episodes: list[int] | dict[str, list[int]] | None = option(
        None,
        "Episodes to use. Default: all. For several datasets, JSON by root; a root without an entry uses all.",
        form="""episode numbers, as 3,7,20:30 (20 to 29), or JSON, as '{"/data/a": [0, 1]}'""",
    )
    exclude_episodes: list[int] | dict[str, list[int]] | str | None = option(
        None,
        "Episodes to leave out, or @FILE, a JSON file with them (`python -m diagnostics.show_dataset` writes one).",
        form="""episode numbers, as 3,7,20:30 (20 to 29), or JSON, as '{"/data/a": [0, 1]}', or @FILE""",
    )
    tasks: list[str] | None = option(
        None,
        "Use only episodes with a task that matches one of these patterns.",
        form="patterns, as 'pick*,*the red bin'",
    )
    eval_split: float = option(
        0.0, "Share of the episodes to hold out for the open-loop error at the end of the run.", min=0, below=1
    )
    # Off, as in lerobot-train.
    image_transforms: ImageTransformOptions = field(default_factory=ImageTransformOptions)
    use_imagenet_stats: bool = option(
        True,
        "For policies that normalise images: use ImageNet's mean and standard deviation, as lerobot-train does, "
        "instead of the dataset's.",
    )
    drop_n_last_frames: int | None = option(
        None,
        "Number of frames at the end of each episode to leave out of training. Default: the policy type's (diffusion: "
        "frames whose action chunk would be mostly padding).",
        min=0,
    )
    # In an idle frame no dimension of state or action moves by a thousandth of its range (data/idle.py).
    skip_idle: float | None = option(
        None,
        "Leave out training frames in which nothing moves for longer than this many seconds. Action chunks of other "
        "frames still include their actions.",
        above=0,
    )
    # data/episode_weights.py lists the forms. Weights do not change a dataset's share of a mixture.
    episode_weights: str | None = option(
        None,
        "Mean number of times that each training episode comes in an epoch. 0 leaves it out.",
        form="a column of the dataset's meta/episodes, or @FILE",
        file="@",
    )
    state_features: list[str] | None = option(
        None,
        "Features, by the dataset's names, to join into observation.state in this order, as float32.",
        form="dataset keys, as joint_position,gripper_position",
    )
    camera_keys: list[str] | None = option(
        None,
        "Cameras to decode. Default: those that the policy uses.",
        form="dataset keys, as observation.images.top,observation.images.wrist",
    )
    missing_cameras: MissingCameras = option(
        "error", "Action for a camera of the policy that the dataset lacks: an error, or a masked image."
    )
    # Smaller rows need less bandwidth, and a shuffle window holds more of them.
    image_size: list[int] | Literal["auto", "stored"] = option(
        "auto",
        "Size of decoded frames. auto: the policy's size, if the policy resizes frames anyway and a row is then at "
        "most half as large; as stored with image_transforms. stored: as stored, bit for bit as LeRobot reads them.",
        form="auto, stored, or [height, width] in pixels",
    )
    on_error: OnError = option(
        "stop",
        "Action for an episode that cannot be read. stop: end the run. skip: its rows keep their places in the "
        "batches, do not count in the loss, and are listed in OUTPUT_DIR/skipped.jsonl.",
    )
    # A run that skips more would train on another dataset than config.json names.
    max_skipped: float = option(
        0.01,
        "With --dataset.on_error skip: maximum share of skipped rows, of the rows trained so far and at least of an "
        "epoch's. A run that skips more ends.",
        min=0,
        max=1,
        only_with="dataset.on_error=skip",
    )
    shuffle_window: int = option(
        512, "Number of rows that are shuffled together, bounded by memory (docs/data_engine.md).", min=1
    )
    # The cache helps if a node's share of the dataset fits and is read more than once.
    cache_dir: str | None = option(
        None, "A folder on each node's own disk that caches bytes read from an object store.", file="path"
    )
    frame_cache: str | None = option(
        None,
        "A folder on each node's own disk that caches decoded frames, for later epochs and runs on the same dataset. "
        "auto: VLA_FRAMES_DIR, if the run reads frames more than once and they fit the disk.",
    )
    # This needs cached frames, and one node or one shard per node. Otherwise a node decodes single frames until it has
    # cached the whole dataset.
    global_shuffle: bool = option(
        False, "From the second epoch on, draw single rows from the whole dataset instead of segments."
    )
    # Each node reads one shard for its workers, so the second epoch reads frames that the node cached in the first
    # (docs/data_engine.md).
    shards: int = option(
        1,
        "Divide the rows into this many equal shards, with equally many rows of each in every batch. Give the number "
        "of nodes with workers.",
        min=1,
    )
    shard_rows: int | None = option(
        None,
        "Consecutive rows of a shard in the stream. Default: the rows that the workers of a node take at once.",
        flag=None,
        min=1,
    )

    def check(self, config: Any) -> None:
        if isinstance(self.image_size, list) and not (len(self.image_size) == 2 and min(self.image_size) > 0):
            raise ValueError(
                f"--dataset.image_size={self.image_size}: expected auto, stored, or [height, width] in pixels"
            )
        if isinstance(self.exclude_episodes, str) and not self.exclude_episodes.startswith("@"):
            raise ValueError(
                f"--dataset.exclude_episodes={self.exclude_episodes}: expected episodes (3,7,20:30) or @FILE"
            )
        mixture = members(self.mixture)
        robots(mixture)
        for name in ("episodes", "exclude_episodes"):
            listed = [member.root for member in mixture if getattr(member, name) is not None]
            if getattr(self, name) is not None and listed:
                raise ValueError(f"--dataset.{name}, and {name} of {listed[0]} in --dataset.mixture: give one of them")
        for name in ("cache_dir", "frame_cache"):
            if "://" in (folder := getattr(self, name) or ""):
                raise ValueError(f"--dataset.{name}={folder}: expected a folder on each node's own disk")
        if not (self.roots or self.repo_id) and (config.preset != "demo" or self.root):
            raise ValueError(
                "which data? give --dataset.root PATH_OR_URI or --dataset.repo_id ID, or use --preset demo"
            )

    def describe_cached_frames(self, folder: str | None, size: int, nodes: str, read_again: bool) -> list[str]:
        """Return the plan's lines on cached frames.

        Args:
            folder: folder of the cache; None if no frames are cached.
            size: bytes of all decoded frames.
            nodes: phrase that says which nodes cache the frames.
            read_again: whether the run reads a frame more than once.
        """
        if self.frame_cache is None:
            return []
        gb = cache_gb(FRAME_CACHE_GB)
        if folder is not None:
            text = f"decoded once: {size / 1e9:.1f} GB of frames"
            if size > gb * 1e9:
                text = f"of {size / 1e9:.1f} GB of frames, VLA_CACHE_GB={gb:g}"
            return [f"             {text} are cached in {folder}, {nodes}"]
        why = "the run reads each frame once"
        if read_again:
            why = (
                f"{size / 1e9:.1f} GB are more than VLA_CACHE_GB={gb:g} or the free space of {FRAMES_DIR}, or that "
                "folder is in memory; --dataset.frame_cache=DIR keeps what fits"
            )
        return [f"             frames are not cached: {why}"]

    @property
    def roots(self) -> list[str]:
        """Return the datasets' locations from --dataset.mixture or --dataset.root; an empty list if both are absent."""
        listed = [part.strip() for part in (self.root or "").split(",")]
        return list(self.mixture or ()) or [root for root in listed if root]


def describe_image_size(size: Sequence[int] | None, row_bytes: int) -> list[str]:
    """Return the plan's line on the size of frames: height and width in pixels, None for frames as stored."""
    if size is None:
        return ["Images       as stored, bit for bit as LeRobot reads them"]
    return [
        f"Images       fitted into {'x'.join(map(str, size))} where they are decoded; rows of {row_bytes / 1e6:.2f} MB"
    ]
