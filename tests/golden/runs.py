"""The golden runs. Each is told by flags alone and leaves a run's folder, so that it outlives what it runs through.

In one process: `vla.train` on the run's own rows, without Ray. With Ray: `vla.py`, in a process of its own.
Run by `python -m tests.golden --record`, which sets the environment: `python -m tests.golden.runs FILE FOLDER NAME...`.
"""

import json
import random
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import save_file

from tests import in_process
from tests.datasets import make_dataset
from tests.golden.records import record
from tests.tiny import make_base
from tests.tiny_backbones import KINDS
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.options.command_line import parse_args, parse_value
from vla_finetuning.plan.resolve import resolve
from vla_finetuning.policies.tiny_pi05 import make_tiny_base
from vla_finetuning.rl.values import resolve_value
from vla_finetuning.training.checkpoint_writer import CheckpointWriter
from vla_finetuning.training.export import export, exported_checkpoint

ROOT = Path(__file__).resolve().parents[2]
TOP, WRIST = "observation.images.top", "observation.images.wrist"
EVERY_RUN = {
    **{"batch_size": 2, "steps": 6, "log_freq": 2, "save_freq": 3, "keep_checkpoints": 99, "run.record_rows": "true"},
    **{"lr": 1e-3, "scaling.use_gpu": "false", "train.deterministic": "true", "train.mode": "full"},
}


class Golden:
    """Datasets and policies in a folder, and the runs on them, each a method that leaves OUTPUT."""

    def __init__(self, folder: Path):
        self.folder = folder

    @cached_property
    def dataset(self) -> Path:
        return make_dataset(self.folder / "dataset", episodes=(9, 8, 7, 6, 5, 4))

    @cached_property
    def damaged(self) -> Path:
        """The dataset with a video file that was cut short."""
        root = Path(shutil.copytree(self.dataset, self.folder / "damaged"))
        video = sorted(root.glob(f"videos/{TOP}/*/*.mp4"))[0]
        video.write_bytes(video.read_bytes()[: video.stat().st_size // 2])
        return root

    @cached_property
    def base(self) -> Path:
        return make_base(self.folder / "base", load_metadata(self.dataset), chunk_size=6, **in_process.TINY)

    def pi05_full(self, output: Path) -> None:
        options: dict[str, Any] = {
            "steps": 9,
            "log_freq": 3,
            "save_freq": 4,
            "grad_accum": 2,
            "train.mask_padding": "true",
        }
        options |= {"dataset.eval_split": 0.3, "eval_steps": 2, "ema.enable": "true", "train.noise_draws": 2}
        options |= {"dataset.on_error": "skip", "dataset.max_skipped": 1, "dataset.statistics": "stored"}
        train(output, {"dataset.root": self.damaged, "policy.path": self.base, **options})

    def pi05_expert(self, output: Path) -> None:
        options: dict[str, Any] = {"train.mode": "expert", "grad_accum": 2, "warmup_frac": 0.3, "final_lr_frac": 0.1}
        train(output, {"dataset.root": self.dataset, "policy.path": self.base, **options})

    def pi05_lora(self, output: Path) -> None:
        options: dict[str, Any] = {"peft.r": 4, "peft.export": "adapter", "lr": 1e-2, "train.mode": None}
        train(output, {"dataset.root": self.dataset, "policy.path": self.base, **options})

    def smolvla(self, output: Path) -> None:
        self._other(output, "smolvla", grad_accum=2, **{"train.exact_mean": "true", "train.noise_draws": 2})

    def act(self, output: Path) -> None:
        self._other(
            output, "act", **{"dataset.eval_split": 0.3, "eval_steps": 3, "dataset.image_transforms.enable": "true"}
        )

    def _other(self, output: Path, kind: str, **changes: Any) -> None:
        """A run of another policy type, from random weights."""
        root = self.folder / "one_camera"
        if not root.exists():
            make_dataset(root, episodes=(12, 9, 10), cameras={TOP: (48, 64)})
        tiny = KINDS[kind]
        given = {**tiny.options, **tiny.folders(self.folder / kind)}
        options: dict[str, Any] = {**{f"policy.{name}": value for name, value in given.items()}, **tiny.run, **changes}
        options |= {"dataset.root": root, "policy.type": kind, "dataset.image_size": "stored", "lr": None}
        train(output, options, here=tiny.here())

    def robots(self, output: Path) -> None:
        base_camera = "observation.images.base"
        one, other = self.folder / "gantry", self.folder / "arm"
        make_dataset(one, episodes=(9, 14, 11, 8), fps=10)
        make_dataset(
            other, episodes=(12, 11, 12, 10), cameras={TOP: (60, 80)}, fps=20, seed=3, state_dim=6, action_dim=5
        )
        members: list[dict[str, Any]] = [
            {"root": "gantry", "weight": 2, "robot": "gantry"},
            {"root": "arm", "robot": "arm"},
        ]
        mixture = {"members": [{**member, "rename_map": {TOP: base_camera}} for member in members]}
        (self.folder / "mixture.yaml").write_text(yaml.safe_dump(mixture))
        features = {
            base_camera: {"dtype": "video", "shape": (60, 80, 3), "names": ["height", "width", "channels"]},
            WRIST: {"dtype": "video", "shape": (96, 80, 3), "names": ["height", "width", "channels"]},
            "observation.state": {"dtype": "float32", "shape": (6,), "names": None},
            "action": {"dtype": "float32", "shape": (5,), "names": None},
        }
        tasks, policy = list(load_metadata(one).tasks.values()), self.folder / "robots_base"
        make_tiny_base(policy, features=features, tasks=tasks, stats=None, fps=10, chunk_size=6, **in_process.TINY)
        options: dict[str, Any] = {"dataset.image_size": "[56, 56]", "dataset.missing_cameras": "mask", "batch_size": 4}
        options |= {"dataset.eval_split": 0.3, "eval_steps": 3}
        where = {"dataset.mixture": f"@{self.folder / 'mixture.yaml'}", "policy.path": policy}
        train(output, {**where, **options})

    def value(self, output: Path) -> None:
        (self.folder / "outcomes.json").write_text(json.dumps(dict(enumerate((1, 0, 1, 0, 1, 0)))))
        options: dict[str, Any] = {
            "outcome.success": f"@{self.folder / 'outcomes.json'}",
            "value.horizon": 3,
            "value.backbone": "true",
        }
        options |= {"dataset.eval_split": 0.34, "eval_steps": 3, "train.mode": None, "run.record_rows": None}
        where = {"dataset.root": self.dataset, "policy.path": self.base}
        train(output, {**where, **options}, of_value=True)

    def grpo(self, output: Path) -> None:
        self._reinforce(output, **{"grpo.method": "grpo", "grpo.kl": 0.01})

    def ppo(self, output: Path) -> None:
        self._reinforce(output, **{"grpo.method": "ppo"})

    def _reinforce(self, output: Path, **changes: Any) -> None:
        """`grpo.train` on episodes that are played in this process; every third is worth something."""
        from tests.rl import test_learning

        base = self.folder / "two_bins_base"
        if not base.exists():
            test_learning.make_base(base)
        output.parent.mkdir(parents=True, exist_ok=True)
        run = test_learning.resolved(base, output, **changes)
        torch.manual_seed(0)
        test_learning.train_as(run)
        export(run.policy, exported_checkpoint(run.job, best=False), output)

    def vla_ray(self, output: Path) -> None:
        """Two workers by way of Ray, then a second process that goes on from the checkpoint; what it predicts."""
        options = {"dataset.root": self.dataset, "policy.path": self.base, "ema.enable": "true", "steps": 3}
        options |= {"dataset.eval_split": 0.3, "eval_steps": 3, "grad_accum": 2}
        program("vla.py", output, options)
        program("vla.py", output, {**options, "steps": 6, "resume": "true"})


def train(
    output: Path,
    options: dict[str, Any],
    *,
    here: AbstractContextManager[None] | None = None,
    of_value: bool = False,
) -> None:
    """A run in this process: real checkpoints, what trained and its average as they are in memory, and the export.

    `here`: what has to be patched to build its policy. An option that is None is left out.
    """
    argv = flags({**EVERY_RUN, "output_dir": output, **options})
    with here or nullcontext(), in_process.tasks_here():
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        run = resolve_value(parse_value(argv), 0).training if of_value else resolve(parse_args(argv), gpus_found=0)
        optimizer = in_process.train(run, worker=in_process.alone(run), make_checkpoints=CheckpointWriter)
        save(output / "trained.safetensors", optimizer.named())
        save(output / "average.safetensors", optimizer.named_average())
        if not of_value:
            export(run.policy, exported_checkpoint(run.job, best=False), output)


def program(name: str, output: Path, options: dict[str, Any]) -> None:
    """A run by one of the programs, in a process and on a Ray of its own."""
    two_workers = {"scaling.num_workers": 2, "scaling.cpus_per_worker": 0.5, "scaling.max_failures": 0}
    argv = flags({**EVERY_RUN, **two_workers, "output_dir": output, **options})
    done = subprocess.run([sys.executable, name, *argv], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = done.stdout.decode(errors="replace")
    sys.stderr.write(said)
    if done.returncode:
        raise RuntimeError(f"{name} ended with status {done.returncode}: {said.splitlines()[-1:]}")


def flags(options: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items() if value is not None]


def save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, path)


def main(file: str, folder: str, *names: str) -> None:
    """Run those names, and write their records to a file; null for a name that is not known here."""
    torch.set_num_threads(1)
    golden, found = Golden(Path(folder)), dict[str, Any]()
    for name in names:
        run: Callable[[Path], None] | None = getattr(golden, name, None)
        output, began = Path(folder) / "runs" / name, time.monotonic()
        try:
            found[name] = None if run is None else run(output) or record(output)
        except Exception as error:
            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print(f"golden: {name} took {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
