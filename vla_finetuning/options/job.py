"""Options of a run and its folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from vla_finetuning.buckets.mirror import as_path
from vla_finetuning.buckets.store import split_address
from vla_finetuning.options.fields import option

CONFIG_NAME = "config.json"
TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]
# Largest seed of NumPy; torch and Python accept larger ones.
MAX_SEED = 2**32 - 1
# Options that belong to one start of a run; their values in config.json are ignored.
PER_START = ("resume", "dry_run", "policy_trust_remote_code")


@dataclass
class JobOptions:
    """The run and its folder."""

    length_flags: ClassVar[str] = "--steps, --num_epochs or MAX_TRAIN_STEPS"
    preset: str | None = option(None, "A set of flags, placed before the given ones. See Presets.")
    output_dir: str | None = option(
        None,
        "Folder of the run: s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, az://CONTAINER/FOLDER or a path that all nodes "
        "share.",
        file="path",
    )
    resume: bool = option(
        False,
        "Continue the run in output_dir. auto: start it if there is none, for jobs with retries.",
        form="true, false or auto",
    )
    lease: bool = option(
        True,
        "Let the store of output_dir refuse a second process that drives this run. false: for a store without "
        "conditional writes; you must then prevent a second process. A folder on a disk is always locked.",
    )
    dry_run: bool = option(False, "Check everything and print the plan; train nothing.")
    seed: int = option(1000, "Seed of all random numbers.", min=0, max=MAX_SEED)
    track: TrackerName | None = option(None, "Also log metrics to a tracker.")
    track_project: str = option("vla-fine-tuning", "Project name in the tracker.")
    given: dict[str, Any] = option({}, "Values as given, by path, of options that a plan has decided.", flag=None)

    def check(self, config: Any) -> None:
        check_output(self.output_dir)

    @property
    def folder(self) -> Path:
        """Return the run's folder; for an `output_dir` in a bucket, this process's local copy."""
        return as_path(self.output_dir or "")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class RunOptions:
    """Records of a run."""

    record_rows: bool = option(
        False, "Write the rows of each micro-batch, for `python -m diagnostics.check_rows OUTPUT_DIR`."
    )


def check_output(output_dir: str | None) -> None:
    """Refuse a missing folder, or one on an unknown object store, as the folder of results."""
    if output_dir is None:
        raise ValueError(
            "where to? give --output_dir s3://BUCKET/FOLDER, or a path (on a cluster, one that all nodes share)"
        )
    try:
        if "://" in output_dir:
            split_address(output_dir)
    except ValueError as error:
        raise ValueError(f"--output_dir={error}") from None
