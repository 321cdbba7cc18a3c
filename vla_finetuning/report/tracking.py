"""Curves of a run in TensorBoard, Weights & Biases, Trackio or MLflow: `--track`. Runs on the driver.

    python -m vla_finetuning.report.tracking OUTPUT_DIR --track trackio

sends what a tracker does not have yet of a run that is over.

The driver follows `metrics.jsonl` and passes its lines on, so no training process waits for a tracker or knows of one.
After a failure the run goes on from a checkpoint and the lines past it are void. TensorBoard takes such points back, so
it gets every line at once; the others cannot, so they get a line when a checkpoint contains it. Each ends up with what
`metrics.jsonl` says, every step once.

`OUTPUT_DIR/tracking.json` holds how far each tracker is: {"wandb": {"run_id": "...", "step": 400}}.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import math
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast, get_args

from vla_finetuning.bucket import BucketPath, place
from vla_finetuning.files import read_json, read_lines, write_json
from vla_finetuning.node_disk import scratch
from vla_finetuning.options.job import CONFIG_NAME, TrackerName
from vla_finetuning.options.programs import Config
from vla_finetuning.plan.record import code_revision
from vla_finetuning.run.checkpoint import checkpoints
from vla_finetuning.run.exported import held_out_errors
from vla_finetuning.run.folder import EVALUATION_NAME, METRICS_NAME, evaluations
from vla_finetuning.run.polling import polling
from vla_finetuning.run.progress import success_of
from vla_finetuning.terminal import escape_warnings, tell_error

logger = logging.getLogger(__name__)

TRACKING_NAME = "tracking.json"
DATABASE_NAME, TRACKIO_NAME = "mlflow.db", "trackio"
POLL_S = 2.0
# A tracker's files are sent to a bucket so often.
MIRROR_S, MIRROR = 60.0, "tracker"
# What to install.
PACKAGE = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
    # The whole of mlflow 3 needs an older pyarrow than this project; these are its client and its local store.
    "mlflow": "mlflow-skinny sqlalchemy alembic",
}
REMEDY = {
    "wandb": "`wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline to store the run in its folder",
    "mlflow": "MLFLOW_TRACKING_URI names the server; unset, the run is stored in its folder",
}
Values = Mapping[str, float]


def require_tracker(name: str | None) -> None:
    """Raises ValueError when the tracker's package is not installed, naming the remedy."""
    if name is None:
        return
    module = PACKAGE[name].split()[0].removesuffix("-skinny")
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"--track {name}: {error}; pip install {PACKAGE[name]}") from error


@contextlib.contextmanager
def track(output_dir: Path, name: str | None, project: str) -> Iterator[None]:
    """While the block runs: pass each line of `metrics.jsonl` on to the tracker, and the held-out errors at the end.

    A run that is resumed goes on with the tracker's run; what that lacks, it gets. A tracker that fails on the way is a
    warning and does not end the training.

    Args:
        output_dir: the run's folder, with its `config.json`.
        name: None: nothing is passed on.
        project: what the tracker files the run under.
    Raises:
        ValueError: on entry, when the tracker's package is missing or it cannot be opened.
    """
    if name is None:
        yield
        return
    link = Link(output_dir, name, project)
    try:
        with polling(link.forward_or_warn, POLL_S):
            yield
    finally:
        try:
            link.finish()
        except Exception as error:
            again = f"`python -m vla_finetuning.report.tracking {output_dir} --track {name}` sends what is missing"
            logger.warning("--track %s: %s: %s; %s", name, type(error).__name__, error, again)


class Link:
    """From a run's folder to its run in a tracker.

    Raises:
        ValueError: the tracker's package is missing, or it cannot be opened.
    """

    def __init__(self, output_dir: Path, name: str, project: str):
        self._folder, self._name, self._problem = output_dir, name, ""
        self._states = read_json(output_dir / TRACKING_NAME)
        state = self._states.get(name, {})
        self._mirror = _Mirror(output_dir)
        # Lines that the tracker has: what it got, as far as the run will go on from there.
        has = min(state.get("step", 0), self._newest_checkpoint())
        self._sent = [line for line in self._lines() if line["step"] <= has]
        require_tracker(name)
        about = {**read_json(output_dir / CONFIG_NAME), "code_revision": code_revision()}
        try:
            tracker = TRACKERS[name](self._mirror.folder, project, state.get("run_id"), has, about)
        except Exception as error:
            remedy = f"; {REMEDY[name]}" if name in REMEDY else ""
            raise ValueError(f"--track {name}: cannot be opened: {type(error).__name__}: {error}{remedy}") from error
        self._tracker: Tracker = tracker
        # The step that the tracker is at: what cannot be taken back counts too.
        step = has if tracker.takes_back else state.get("step", 0)
        self._state = {**state, "run_id": tracker.run_id, "step": step}
        self._save(now=True)

    def forward(self) -> None:
        """Pass on the lines that the tracker does not have."""
        lines = self._lines()
        if self._tracker.takes_back:
            same = 0
            while same < min(len(lines), len(self._sent)) and lines[same] == self._sent[same]:
                same += 1
            if same == len(lines):
                return  # nothing new; what is void is taken back when there is something in its place
            if same < len(self._sent):
                self._sent = lines[:same]
                self._state["step"] = lines[same - 1]["step"] if same else 0
                self._tracker.take_back(self._state["step"])
            new = lines[same:]
        else:
            newest = self._newest_checkpoint()
            new = [line for line in lines if self._state["step"] < line["step"] <= newest]
        try:
            for line in new:
                self._tracker.log(line["step"], _numbers("train", line))
                self._state["step"] = line["step"]
                self._state["success_step"] = line.get("success_step", self._state.get("success_step"))
                self._sent.append(line)
        finally:
            if new:
                # What is taken back is soon given again: it can wait.
                self._save(now=not self._tracker.takes_back)

    def forward_evaluation(self) -> None:
        """Pass on the held-out errors, and the last success in the loop, once."""
        # Of the last checkpoint, which plays after the last line was passed on.
        played = evaluations(self._folder)
        if played and played[-1]["step"] != self._state.get("success_step"):
            self._tracker.log(self._state["step"], _numbers("train", success_of(played[-1])))
            self._state["success_step"] = played[-1]["step"]
            self._save(now=True)
        evaluation = read_json(self._folder / EVALUATION_NAME)
        errors = evaluation and held_out_errors(evaluation)
        if errors and errors != self._state.get("evaluation"):
            self._tracker.log(self._state["step"], _numbers("eval_mse", errors))
            self._state["evaluation"] = errors
            self._save(now=True)

    def forward_or_warn(self) -> None:
        try:
            self.forward()
            self._problem = ""
        except Exception as error:
            problem = f"--track {self._name}: {type(error).__name__}: {error}"
            if problem != self._problem:
                logger.warning("%s; training goes on, and it is tried again", problem)
            self._problem = problem

    def finish(self) -> None:
        """Pass on all that is left, and wait until it is where it belongs."""
        try:
            self.forward()
            self.forward_evaluation()
        finally:
            self._tracker.close()
            self._save(now=True)

    def _lines(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in read_lines(self._folder / METRICS_NAME)]

    def _newest_checkpoint(self) -> int:
        """Optimizer steps that the newest checkpoint contains; 0 when there is none."""
        return max(checkpoints(self._folder / "checkpoints"), default=0)

    def _save(self, now: bool) -> None:
        """Write down what the tracker has: of a run in a bucket when its files are there, too."""
        if self._mirror.send(now):
            write_json(self._folder / TRACKING_NAME, {**self._states, self._name: self._state})


class _Mirror:
    """A folder on a disk for the files of a tracker: the run's own, or of a run in a bucket one that is sent there."""

    def __init__(self, output_dir: Path):
        self._output_dir, self._sent, self._last = output_dir, dict[str, tuple[int, int]](), -math.inf
        self.folder = output_dir
        if isinstance(output_dir, BucketPath):
            self.folder = scratch(output_dir) / MIRROR / output_dir.name
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            # Those that trackers go on with.
            inside = [output_dir / TRACKIO_NAME / name for name in (output_dir / TRACKIO_NAME).below()]
            for file in (output_dir / DATABASE_NAME, *inside):
                if file.is_file():
                    here = self.folder / file.relative_to(output_dir).as_posix()
                    here.parent.mkdir(parents=True, exist_ok=True)
                    file.download(here, file.content())

    def send(self, now: bool) -> bool:
        """Send what has changed, every MIRROR_S at most unless it is to be `now`. Whether all is there."""
        if self.folder == self._output_dir:
            return True
        if not now and time.monotonic() - self._last < MIRROR_S:
            return False
        self._last = time.monotonic()
        for file in self.folder.rglob("*"):
            if file.is_file() and not file.is_symlink():
                name, status = file.relative_to(self.folder).as_posix(), file.stat()
                if self._sent.get(name) != (found := (status.st_size, status.st_mtime_ns)):
                    there = self._output_dir / name
                    assert isinstance(there, BucketPath)
                    there.upload(file)
                    self._sent[name] = found
        return True


def is_mirror(folder: Path) -> bool:
    """Whether it is that of a run in a bucket."""
    return folder.parent.name == MIRROR


# ---- trackers -----------------------------------------------------------------------------------------------------


class Tracker(Protocol):
    """A run in a tracker. Made with (run's folder, project, run_id, step, about): `run_id` None is a new run, otherwise
    the one that has been given points up to `step`; `about` is what it is a run of.

    Attributes:
        run_id: by which it is found again.
        takes_back: whether points can be removed (`take_back`). If not, none comes twice.
    """

    run_id: str
    takes_back: bool

    def log(self, step: int, values: Values) -> None:
        """Points at an optimizer step, which is not before that of the last call."""

    def take_back(self, step: int) -> None:
        """Remove all points after `step`."""

    def close(self) -> None:
        """Wait until everything is where it belongs."""


class TensorBoard:
    """Event files in `OUTPUT_DIR/tensorboard`. A file may say from which step on the ones before it are void."""

    takes_back = True

    def __init__(self, output_dir: Path, project: str, run_id: str | None, step: int, about: Mapping[str, Any]):
        self._folder, self.run_id = output_dir / "tensorboard", output_dir.name
        self._open(step)
        self._writer.add_text("config", f"```json\n{json.dumps(about, indent=2)}\n```", step)

    def _open(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Files are read in the order of their names, which tell the second and then a number without leading zeros.
        while list(self._folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
            time.sleep(0.1)
        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1)

    def log(self, step: int, values: Values) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def take_back(self, step: int) -> None:
        self._writer.close()
        self._open(step)

    def close(self) -> None:
        self._writer.close()


class _Appending:
    """What trackers have in common that keep every point they are given."""

    takes_back = False

    def take_back(self, step: int) -> None:
        raise NotImplementedError("points cannot be removed")


class WeightsAndBiases(_Appending):
    """WANDB_MODE=offline keeps the run in its folder, for `wandb sync`; WANDB_ENTITY and the like work as usual."""

    def __init__(self, output_dir: Path, project: str, run_id: str | None, step: int, about: Mapping[str, Any]):
        import wandb

        self.run_id = run_id or _new_id()
        self._is_mirror = is_mirror(output_dir)
        self._run = wandb.init(
            project=project,
            id=self.run_id,
            name=output_dir.name,
            resume="allow",
            dir=output_dir,
            config=dict(about),
            # Nothing is captured: the run's folder has the log, and a terminal may show more than belongs elsewhere.
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
        if self._is_mirror:
            import wandb

            wandb.teardown()  # its own process still writes the run's file when `finish` returns (0.31)


class Trackio(_Appending):
    """In TRACKIO_DIR on this machine, or a Space or server where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL name one.

    Without any of them, of a run in a bucket in its folder `trackio`, as the next process may be on another machine.
    """

    def __init__(self, output_dir: Path, project: str, run_id: str | None, step: int, about: Mapping[str, Any]):
        if is_mirror(output_dir) and not any(os.environ.get(f"TRACKIO_{name}") for name in ("SPACE_ID", "SERVER_URL")):
            os.environ.setdefault("TRACKIO_DIR", str(output_dir / TRACKIO_NAME))  # which it reads when it is imported
        import trackio

        # It finds a run by its name.
        self.run_id = run_id or f"{output_dir.name}-{_new_id()}"
        self._run = trackio.init(
            project=project,
            name=self.run_id,
            resume="allow" if run_id is None else "must",
            config=dict(about),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow(_Appending):
    """On the server that MLFLOW_TRACKING_URI names; without one in `OUTPUT_DIR/mlflow.db`."""

    def __init__(self, output_dir: Path, project: str, run_id: str | None, step: int, about: Mapping[str, Any]):
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = f"sqlite:///{output_dir.absolute() / DATABASE_NAME}"
            # Connections that outlive a call would be to a file that is gone when the next `Link` brings a newer one.
            os.environ.setdefault("MLFLOW_SQLALCHEMYSTORE_POOLCLASS", "NullPool")
        self._client = MlflowClient(tracking_uri=uri)
        if run_id is None:
            found = self._client.get_experiment_by_name(project)
            experiment = found.experiment_id if found else self._client.create_experiment(project)
            run_id = self._client.create_run(experiment, run_name=output_dir.name).info.run_id
            params = [Param(key, str(value)[:6000]) for key, value in _flat(about)]  # longer ones are refused
            for start in range(0, len(params), 100):  # and so are more at once
                self._client.log_batch(run_id, params=params[start : start + 100])
        self.run_id = cast(str, run_id)
        self._client.update_run(self.run_id, status="RUNNING")

    def log(self, step: int, values: Values) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._client.log_batch(self.run_id, metrics=[Metric(key, v, now_ms, step) for key, v in values.items()])

    def close(self) -> None:
        self._client.set_terminated(self.run_id)


TRACKERS: dict[str, Any] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
    "mlflow": MLflow,
}


# ---- what is sent --------------------------------------------------------------------------------------------------


def _numbers(group: str, line: Mapping[str, Any]) -> dict[str, float]:
    """What a tracker shows of a line: its numbers, those of each robot too."""
    named = {key: value for key, value in line.items() if key != "step"}
    for key in ("loss_by_robot", "eval_loss_by_robot"):
        named |= {f"{key}/{robot}": value for robot, value in (line.get(key) or {}).items()}
    return {f"{group}/{key}": value for key, value in named.items() if isinstance(value, int | float)}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Options as flags name them: ("dataset.root", ...)."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _new_id() -> str:
    return uuid.uuid4().hex[:8]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 all is sent, 1 it is not."""
    parser = argparse.ArgumentParser(description="Send a run's curves to a tracker that does not have them yet.")
    parser.add_argument("output_dir", type=place)
    parser.add_argument("--track", required=True, choices=get_args(TrackerName))
    parser.add_argument("--track_project", default=Config.track_project)
    args = parser.parse_args(argv)
    escape_warnings()
    try:
        if not (args.output_dir / CONFIG_NAME).is_file():
            raise ValueError(f"{args.output_dir}: no run is there ({CONFIG_NAME} is missing)")
        link = Link(args.output_dir, args.track, args.track_project)
        link.finish()
    except Exception as error:
        tell_error(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
