"""Log a run's metrics to TensorBoard, Weights & Biases, Trackio or MLflow (`--track`). Runs on the driver.

    python -m vla_finetuning.report.tracking OUTPUT_DIR --track trackio

sends a tracker the missing lines of a run that is over.

The driver follows `metrics.jsonl` and logs each new line. A step that a resumed run trains again is logged again at the
same step. `OUTPUT_DIR/tracking.json` has each tracker's run and the last logged line:
{"wandb": {"run_id": "...", "line": "..."}}.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

from vla_finetuning.buckets.mirror import address, as_path, mirror_of, synced
from vla_finetuning.files import read_json, read_lines, write_json
from vla_finetuning.options.fields import leaves
from vla_finetuning.options.job import CONFIG_NAME, TrackerName
from vla_finetuning.options.programs import Config
from vla_finetuning.run.exported import held_out_errors
from vla_finetuning.run.folder import EVALUATION_NAME, METRICS_NAME, RUN_NAME
from vla_finetuning.run.polling import polling
from vla_finetuning.run.revision import code_revision
from vla_finetuning.terminal import escape_warnings, print_safe_error

logger = logging.getLogger(__name__)

TRACKING_NAME, DATABASE_NAME, TRACKIO_NAME = "tracking.json", "mlflow.db", "trackio"
# Seconds between reads of metrics.jsonl.
POLL_S = 2.0
# mlflow 3 needs an older pyarrow than this project; these packages are its client and its local store.
PACKAGES = {"mlflow": "mlflow-skinny sqlalchemy alembic"}
REMEDIES = {
    "wandb": "`wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline to store the run in its folder",
    "mlflow": "MLFLOW_TRACKING_URI names the server; unset, the run is stored in its folder",
}


def require_tracker(name: str | None) -> None:
    """Raise ValueError if the tracker's package is not installed."""
    if name is not None and importlib.util.find_spec(name) is None:
        raise ValueError(f"--track {name}: its package is not installed; pip install {PACKAGES.get(name, name)}")


@contextlib.contextmanager
def track(output_dir: Path, name: str | None, project: str) -> Iterator[None]:
    """Log the run's metrics to a tracker while the block runs, and the held-out errors at its end.

    A tracker that fails meanwhile is a warning; missing lines are sent when it works again. Raises as `Follower` on
    entry.
    """
    if name is None:
        yield
        return
    follower, warned = Follower(output_dir, name, project), set[str]()

    def attempt(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            command = f"python -m vla_finetuning.report.tracking {address(output_dir)} --track {name}"
            problem = f"--track {name}: {type(error).__name__}: {error}; `{command}` sends what is missing"
            if problem not in warned:
                logger.warning("%s", problem)
            warned.add(problem)

    try:
        with polling(partial(attempt, follower.log_new), POLL_S):
            yield
    finally:
        attempt(follower.finish)


class Follower:
    """Log the lines of a run's `metrics.jsonl` to a tracker. Raises ValueError if it is missing or cannot be opened."""

    def __init__(self, output_dir: Path, name: str, project: str):
        self._output_dir, self._name = output_dir, name
        if mirror_of(output_dir):  # before Trackio is imported, which reads the variable then
            os.environ.setdefault("TRACKIO_DIR", str(output_dir / TRACKIO_NAME))
        state = read_json(output_dir / TRACKING_NAME).get(name, {})
        about = {**read_json(output_dir / CONFIG_NAME), "code_revision": code_revision()}
        require_tracker(name)
        try:
            self._tracker = TRACKERS[name](output_dir, project, state.get("run_id"), about)
        except Exception as error:
            remedy = f"; {REMEDIES[name]}" if name in REMEDIES else ""
            raise ValueError(f"--track {name}: cannot be opened: {type(error).__name__}: {error}{remedy}") from error
        # The file only grows and shrinks at its end: if the last logged line is in it, all lines before were logged.
        lines, last = self._lines(), state.get("line")
        is_known = self._tracker.run_id == state.get("run_id") and last in lines
        self._logged = lines[: lines.index(last) + 1] if is_known else []
        self._save()

    def log_new(self, *, at_end: bool = False) -> None:
        """Log the lines that the tracker lacks."""
        lines = self._lines(at_end)
        known = len(os.path.commonprefix([lines, self._logged]))
        if known == len(lines) == len(self._logged):
            return
        del self._logged[known:]
        try:
            for text in lines[known:]:
                line = json.loads(text)
                self._tracker.log(_charts(line), line["step"])
                self._logged.append(text)
        finally:
            self._save()

    def finish(self) -> None:
        """Log the remaining lines and the held-out errors, and wait until they are stored."""
        try:
            self.log_new(at_end=True)
        finally:
            self._tracker.close()
            self._save()

    def _lines(self, at_end: bool = True) -> list[str]:
        """Return the lines of `metrics.jsonl`, and after the last step a line with the held-out errors."""
        lines = read_lines(self._output_dir / METRICS_NAME)
        errors = held_out_errors(read_json(self._output_dir / EVALUATION_NAME)) if at_end and lines else {}
        if errors:
            step, steps = json.loads(lines[-1])["step"], read_json(self._output_dir / RUN_NAME).get("steps", 0)
            # Errors on disk are older than the last line if an extended run has stopped early.
            lines += [json.dumps({"step": step, "eval_mse": errors})] if step >= steps else []
        return lines

    def _save(self) -> None:
        state = {"run_id": self._tracker.run_id, "line": self._logged[-1] if self._logged else None}
        path = self._output_dir / TRACKING_NAME
        write_json(path, {**read_json(path), self._name: state})


def _charts(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line, with those of each robot but not of tasks, whose names are instructions."""
    charts = {f"train/{key}": value for key, value in line.items() if key != "step"}
    for key, by_robot in line.items():
        if key.endswith("_by_robot"):
            charts |= {f"train/{key}/{robot}": value for robot, value in (by_robot or {}).items()}
    charts |= {f"eval_mse/{name}": error for name, error in line.get("eval_mse", {}).items()}
    return {key: value for key, value in charts.items() if isinstance(value, int | float)}


# ---- trackers -----------------------------------------------------------------------------------------------------


# A tracker is made of the run's folder, the project, the id of the run that it resumes or None, and facts of the run.
# `run_id` finds the run again; `log` adds a point to each chart, in place of points at this step and later; `close`
# returns when everything is stored.


class TensorBoard:
    """Event files in `OUTPUT_DIR/tensorboard`. Each process begins a run that replaces earlier ones."""

    def __init__(self, folder: Path, project: str, run_id: str | None, about: Mapping[str, Any]):
        self._folder, self._about, self.run_id = folder / "tensorboard", about, uuid.uuid4().hex
        self._steps: dict[str, int] = {}
        self._open(0)

    def _open(self, step: int) -> None:
        """Begin a file that deletes all points from `step` on."""
        from torch.utils.tensorboard import SummaryWriter

        # Files are read in the order of their names, so two of them must not have the same second in their names.
        while list(self._folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
            time.sleep(0.1)
        self._writer = SummaryWriter(str(self._folder), purge_step=step)
        self._writer.add_text("config", f"```json\n{json.dumps(self._about, indent=2)}\n```", step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        if any(self._steps.get(key, -1) >= step for key in values):
            self.close()
            self._open(step)
            self._steps.clear()
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
            self._steps[key] = step
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run on W&B's server, or with WANDB_MODE=offline in `OUTPUT_DIR/wandb`. W&B ignores steps before the last."""

    def __init__(self, folder: Path, project: str, run_id: str | None, about: Mapping[str, Any]):
        import wandb

        # The console is not captured: the run's folder has the log, and a terminal may show private text.
        settings = wandb.Settings(console="off", silent=True)
        options: dict[str, Any] = {"name": folder.name, "dir": folder, "config": dict(about), "settings": settings}
        self._run = wandb.init(project=project, id=run_id, resume="allow", **options)
        self.run_id = self._run.id

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # wandb's process still writes the run's file when `finish` returns (0.31)


class Trackio(WeightsAndBiases):
    """A run on this machine, or at TRACKIO_SPACE_ID or TRACKIO_SERVER_URL. Trackio keeps all points of a step."""

    def __init__(self, folder: Path, project: str, run_id: str | None, about: Mapping[str, Any]):
        import trackio

        options: dict[str, Any] = {"config": dict(about), "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        try:
            self._run = trackio.init(project=project, name=run_id, resume="must", **options)
        except ValueError:  # no name, or no such run in this database, where a run's first line creates it
            name = f"{folder.name}-{uuid.uuid4().hex[:8]}"
            self._run = trackio.init(project=project, name=name, resume="never", **options)
        self.run_id = self._run.name  # which identifies a run

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run at MLFLOW_TRACKING_URI, by default in `OUTPUT_DIR/mlflow.db`. MLflow keeps all points of a step."""

    def __init__(self, folder: Path, project: str, run_id: str | None, about: Mapping[str, Any]):
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.absolute() / DATABASE_NAME}"
        # No connection may outlive a call, because the next process in this folder may replace the file.
        os.environ.setdefault("MLFLOW_SQLALCHEMYSTORE_POOLCLASS", "NullPool")
        self._client = MlflowClient(tracking_uri=uri)
        if run_id is None:
            experiment = self._client.get_experiment_by_name(project)
            experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(project)
            run_id = str(self._client.create_run(experiment_id, run_name=folder.name).info.run_id)
            params = [Param(key, str(value)[:6000]) for key, value in leaves(about, ())]  # MLflow's limits of length
            for start in range(0, len(params), 100):  # and of number
                self._client.log_batch(run_id, params=params[start : start + 100])
        self.run_id = run_id
        self._client.update_run(run_id, status="RUNNING")

    def log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._client.log_batch(self.run_id, metrics=[Metric(key, v, now_ms, step) for key, v in values.items()])

    def close(self) -> None:
        self._client.set_terminated(self.run_id)


TRACKERS: dict[str, Callable[..., Any]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
    "mlflow": MLflow,
}


def main(argv: list[str] | None = None) -> int:
    """Send a run's missing lines. Return the exit status: 0 all lines are sent, 1 an error."""
    parser = argparse.ArgumentParser(description="Send a run's curves to a tracker that does not have them yet.")
    parser.add_argument("output_dir", type=as_path)
    parser.add_argument("--track", required=True, choices=get_args(TrackerName))
    parser.add_argument("--track_project", help="Default: the run's.")
    args = parser.parse_args(argv)
    escape_warnings()
    try:
        with synced(args.output_dir):
            if not (args.output_dir / CONFIG_NAME).is_file():
                raise ValueError(f"{address(args.output_dir)}: no run is there ({CONFIG_NAME} is missing)")
            project = read_json(args.output_dir / CONFIG_NAME).get("track_project", Config.track_project)
            Follower(args.output_dir, args.track, args.track_project or project).finish()
    except Exception as error:
        print_safe_error(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
