"""Measure on a GPU what the planner predicts without one, and check the program there.

    python -m benchmarks.gpu --minutes 20 --json FILE [--only machine run "steps, full" ...] [--tiny]

The sections are the machine, a whole run with a resume and the export, training steps of all modes (eager, compiled,
LeRobot's and the naive loop of benchmarks/step.py), a checkpoint, predictions, the data engine, attention kernels,
synchronisations, and the tests marked `gpu`. PI0.5 has its real size and random weights. Sections run in processes with
time limits (benchmarks/sections.py): failures and sections without time left are recorded in FILE with the results. The
command prints a table of planned and measured values. `--tiny` rehearses everything on a CPU at small sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import torch

from benchmarks import step, updates
from benchmarks.datasets import make
from benchmarks.sections import Results, Section, run_sections
from diagnostics.audit_syncs import audit
from diagnostics.report import Environment, format_table
from diagnostics.tool import free_memory, peak_memory
from util import enable_expandable_segments, enable_gpu_perf_flags, peak_flops
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.files import read_json, read_json_lines
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.options.train import TrainMode
from vla_finetuning.plan.resolve import resolve
from vla_finetuning.policies.attention import CANDIDATES, UNAVAILABLE, choose_kernel, find_fault
from vla_finetuning.policies.compiling import Compiler, why_not
from vla_finetuning.policies.meta import meta_policy
from vla_finetuning.policies.processors import DeviceHalf
from vla_finetuning.policies.prompts import ALIGNMENT
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.tiny import make_tiny_base
from vla_finetuning.policies.trainable import autocast_dtype, cast_frozen, choose_trainable
from vla_finetuning.run import checkpoint as checkpoints
from vla_finetuning.run.checkpoint import OPTIMIZER, TRAINABLE, Piece, Progress
from vla_finetuning.run.folder import EVALUATION_NAME, METRICS_NAME
from vla_finetuning.terminal import print_safe, print_safe_error, print_safe_text
from vla_finetuning.training import model
from vla_finetuning.training.capacity import fits
from vla_finetuning.training.memory import GIB

ROOT = Path(__file__).resolve().parent.parent
ACCUMULATED_ROWS = 8
# Targets on one H100 by mode: rows/s and MFU.
TARGETS: dict[TrainMode, dict[str, float]] = {"full": {"rows_per_s": 30, "mfu": 0.45}, "expert": {"rows_per_s": 90}}
# Modes in the order of measurement.
MODES: tuple[TrainMode, ...] = ("full", "expert", "heads")
PEERS = ("lerobot", "naive")
Cells = Sequence[tuple[str, Callable[[torch.device], Any]]]  # names and measurements


@dataclass(frozen=True)
class Sizes:
    """Sizes and durations of the measurements.

    Attributes:
        seconds: duration of measured steps.
        share: factor of the expected durations on a GPU.
        tests: pattern of test files, of which those with tests for a GPU run.
        patience: factor of the time limits on a GPU.
    """

    batch_sizes: tuple[int, ...] = (1, 8, 16, 32, 64)
    peers_at: tuple[int, ...] = (1, 8, 16)
    seconds: float = 3.0
    steps: int = 200
    live_rows: int = 400
    predicted_rows: tuple[int, ...] = (1, 8, 32)
    tests: str = "test_*.py"
    share: float = 1.0
    patience: float = 1.0


TINY = Sizes((1, 2), (2,), 0.0, 4, 100, (2,), "test_util.py", share=0.1, patience=4.0)


def machine(device: torch.device) -> dict[str, Any]:
    entries: dict[str, Any] = {**Environment.here().model_dump(), "cuda": torch.version.cuda}
    if device.type == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        entries |= {"cudnn": torch.backends.cudnn.version(), "nccl": nccl, "peak_flops": peak_flops(device)}
        entries["capability"] = list(torch.cuda.get_device_capability(device))
        entries["gpu_memory_bytes"] = torch.cuda.get_device_properties(device).total_memory
    return entries


def attention(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Check every kernel at every possible length of prompts, including lengths that `prompt_lengths` avoids."""
    config = updates.policy_config(device)
    policy = meta_policy(config)
    choose_trainable(policy, "full")
    loss = family_of(config).make_loss(policy, attention="sdpa")
    lengths = range(ALIGNMENT, config.tokenizer_max_length + 1, ALIGNMENT)
    shapes = loss.attentions(updates.CAMERAS, lengths)
    entries: dict[str, Any] = {}
    for kernel in CANDIDATES[:-1]:
        if find_fault(kernel, shapes[:1], device, dtype) == UNAVAILABLE:
            entries[kernel] = UNAVAILABLE
            continue
        wrong = {str(shape): find_fault(kernel, [(layer, shape)], device, dtype) for layer, shape in shapes}
        entries[kernel] = {"shapes": len(wrong), "wrong": {shape: reason for shape, reason in wrong.items() if reason}}
    used = loss.attentions(updates.CAMERAS, updates.prompt_lengths(config))
    chosen = choose_kernel("sdpa", used, device, dtype)
    return {"kernels": entries, "chosen": chosen.kernel, "backends": chosen.backends, "refused": chosen.refused}


def demo_flags(device: torch.device, folder: Path) -> list[str]:
    use_gpu = "true" if device.type == "cuda" else "false"
    return ["--preset=demo", f"--output_dir={folder}", "--scaling.num_workers=1", f"--scaling.use_gpu={use_gpu}"]


def waits(device: torch.device) -> dict[str, Any]:
    """Return the synchronisations between two log steps of the demo's run."""
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        entries = audit(resolve(parse_args(demo_flags(device, Path(folder))), torch.cuda.device_count()))
    lines = [f"{sync.operation} at {sync.where}, {sync.times} times" for sync in entries.syncs]
    return {"looked_at": entries.seen, "steps": entries.steps, "waits": lines}


def gpu_tests(device: torch.device, *, chosen: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", *chosen, "-q", "-p", "no:cacheprovider", "--no-header"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    tail = done.stdout.splitlines()[-20:]
    if done.returncode:
        raise RuntimeError("\n".join([f"pytest ended with status {done.returncode}", *tail, done.stderr[-1000:]]))
    return {"status": done.returncode, "tail": tail}


def planned_bytes(mode: TrainMode, size: int, device: torch.device) -> int | None:
    """Return the planned memory of a step; None if it does not fit the device."""
    accum, on_gpu = max(1, ACCUMULATED_ROWS // size), device.type == "cuda"
    needed = step.planned(updates.policy_config(device), mode, size, accum, on_gpu)
    if on_gpu and not fits(needed, torch.cuda.get_device_properties(device).total_memory / GIB):
        return None
    return needed.peak


def steps(
    results: Results, *, mode: TrainMode, name: str, sizes: Sizes, device: torch.device, compiled: bool = False
) -> None:
    """Measure a contender at growing batch sizes, until one fails or its plan does not fit."""
    prepare_process(device)
    label = f"step, {mode}, {name}{', compiled' * compiled}"
    batch_sizes, about_s = (sizes.batch_sizes, 25.0) if name == "ours" else (sizes.peers_at, 20.0)
    if compiled:
        if device.type == "cuda" and (reason := why_not(device)):
            results.write(label, {"left_out": reason})
            return
        # Measure the smallest size, which kernel launches bound, and the largest that fits.
        fitting = [n for n in batch_sizes if "result" in results.entries.get(f"step, {mode}, ours, {n} rows", {})]
        batch_sizes, about_s = tuple(sorted({*fitting[:1], *fitting[-1:]})) or batch_sizes, 60.0
    contender = functools.cache(partial(make_contender, name, mode, device, compiled))

    def measure(size: int, planned: int | None) -> dict[str, Any] | None:
        try:
            sample = step.measure_at(contender(), name, mode, size, ACCUMULATED_ROWS, sizes.seconds, device)
        except torch.OutOfMemoryError:
            if name == "ours":  # its plan is wrong
                raise
            return None
        return {**sample, "planned_bytes": planned}

    for size in batch_sizes:
        planned = planned_bytes(mode, size, device) if name == "ours" else None
        if name == "ours" and planned is None:
            break
        if results.take(f"{label}, {size} rows", sizes.share * about_s, partial(measure, size, planned)) is None:
            break


def make_contender(name: str, mode: TrainMode, device: torch.device, compiled: bool) -> Any:
    # Without a GPU, compile up to the code generator.
    graphs_only = mock.patch.multiple(model, why_not=lambda device: None, Compiler=partial(Compiler, "aot_eager"))
    with graphs_only if compiled and device.type != "cuda" else contextlib.nullcontext():
        options = {"compiled": True} if compiled else {}
        return updates.CONTENDERS[name](updates.policy_config(device), mode, device, device.type == "cuda", **options)


def checkpoint(device: torch.device, mode: TrainMode = "expert") -> dict[str, Any]:
    """Save the trained state after a step, load it into zeroed tensors, and compare bit for bit."""
    config, rows = updates.policy_config(device), 2
    contender = updates.Ours(config, mode, device, device.type == "cuda")
    batches = contender.feed(itertools.repeat(contender.stored(updates.prepared_rows(config, rows, seed=0))))
    contender.step(batches, 1, 0)
    state = {TRAINABLE: contender.optimizer.named(), OPTIMIZER: contender.optimizer.state()}
    tensors = {**state[TRAINABLE], **state[OPTIMIZER]}
    staging, marks = checkpoints.Staging(tensors), []

    def mark() -> None:
        step.synchronize(device)
        marks.append(time.perf_counter())

    mark()
    for _ in range(2):  # the first copy allocates memory, which a run does in the background
        copies = {
            group: {key: Piece(copy, (0,) * copy.ndim) for key, copy in staging.copied(tensors_of).items()}
            for group, tensors_of in state.items()
        }
        mark()
    with tempfile.TemporaryDirectory(prefix="gpu-") as name:
        folder = Path(name) / "step_00000001"
        checkpoints.commit(folder, Progress(1, rows, {}, {}, mode, rows), checkpoints.write_pieces(folder, copies), 0)
        mark()
        for tensor in tensors.values():
            tensor.zero_()
        checkpoints.load_checkpoint(folder, state[TRAINABLE], state[OPTIMIZER])
        mark()
    saved = {f"{group} {key}": (p.values, state[group][key]) for group in copies for key, p in copies[group].items()}
    differing = [name for name, (values, read) in saved.items() if not torch.equal(read.cpu(), values)]
    size = sum(values.nbytes for values, _ in saved.values())
    staging.close()
    if differing:
        raise RuntimeError(f"{len(differing)} tensors were read back with other bits, e.g. {differing[0]}")
    first_s, pause_s, write_s, read_s = np.diff(marks).tolist()
    about = {"mode": mode, "bytes": size, "memory_made_s": max(0.0, first_s - pause_s), "pause_s": pause_s}
    return {**about, "write_s": write_s, "read_s": read_s, "same_bits": True}


def prediction(device: torch.device, rows: int, mode: TrainMode = "expert") -> dict[str, Any]:
    """Predict a batch of chunks as the open-loop evaluation does, with its precision and cast frozen weights."""
    config, bf16 = updates.policy_config(device), device.type == "cuda"
    autocast = autocast_dtype("bf16" if bf16 else "fp32", device)
    policy = updates.make_policy(config, mode, device).eval()
    if autocast is not None:
        cast_frozen(policy, autocast)
    columns = updates.prepared_rows(config, rows, seed=0)
    batch = DeviceHalf(None, config)({key: torch.from_numpy(value).to(device) for key, value in columns.items()})
    free_memory(device)
    for _ in range(2):  # once to warm up
        step.synchronize(device)
        started = time.perf_counter()
        with torch.no_grad(), torch.autocast(device.type, autocast, enabled=autocast is not None):
            chunk = policy.predict_action_chunk(batch)
        step.synchronize(device)
        seconds = time.perf_counter() - started
    about = {"rows": rows, "chunk": list(chunk.shape), "precision": str(autocast or torch.float32)}
    return {**about, "rows_per_s": rows / seconds, "peak_memory_bytes": peak_memory(device)}


def whole_run(device: torch.device, steps: int) -> dict[str, Any]:
    """Run half of the demo's steps by the command line, then resume to the end.

    Each is a process, because Ray Train keeps its resources until the driver ends.
    """
    half = max(1, steps // 2)
    with tempfile.TemporaryDirectory(prefix="gpu-") as name:
        folder = Path(name) / "run"
        first = [*demo_flags(device, folder), f"--steps={half}", f"--save_freq={half}", "--log_freq=2"]
        then = [f"--output_dir={folder}", "--resume", f"--steps={steps}"]
        for flags in (first, then):
            subprocess.run([sys.executable, "vla.py", *flags], cwd=ROOT, check=True)
        lines = read_json_lines(folder / METRICS_NAME)
        evaluation = read_json(folder / EVALUATION_NAME)
        exported = sorted(path.name for path in (folder / "pretrained_model").glob("*.safetensors"))
    keys = ("step", "loss", "samples_per_s", "step_s", "data_wait_s", "mfu", "peak_memory_bytes", "checkpoint_pause_s")
    errors = {name: (evaluation.get("trained", {}).get(name) or {}).get("mse") for name in ("policy", "mean_action")}
    about = {"exported": exported, "steps": [line["step"] for line in lines]}
    return {**about, **{key: lines[-1].get(key) for key in keys}, **errors}


def live(device: torch.device, *, rows: int) -> dict[str, Any]:
    """Measure the data engine with three cameras and images of PI0.5's size, without a model."""
    root = make("av1_240x320x3", rows)
    meta = load_metadata(root)
    about: dict[str, Any] = {"features": meta.features, "tasks": list(meta.tasks.values()), "stats": meta.stats}
    with tempfile.TemporaryDirectory(prefix="gpu-") as name:
        folder = Path(name)
        base = make_tiny_base(folder / "base", **about, fps=meta.fps, chunk_size=50, image_resolution=(224, 224))
        flags = {"dataset.root": root, "dataset.statistics": "stored", "dataset.image_size": "auto"}
        flags |= {"policy.path": base, "batch_size": 8, "profile_batches": 4 * rows, "json": folder / "loader.json"}
        command = [sys.executable, "-m", "diagnostics.profile_dataloader", *demo_flags(device, folder / "run")]
        subprocess.run([*command, *(f"--{key}={value}" for key, value in flags.items())], cwd=ROOT, check=True)
        entries = read_json(folder / "loader.json")
    return {key: entries[key] for key in ("rows_per_s", "rows", "data_cpus", "stages", "spilled_bytes")}


def take_all(results: Results, *, cells: Cells, about_s: float, device: torch.device) -> None:
    """Take the measurements `cells`, each of about `about_s` seconds."""
    prepare_process(device)
    for name, measure in cells:
        results.take(name, about_s, partial(measure, device))


def prepare_process(device: torch.device) -> None:
    enable_gpu_perf_flags()
    enable_expandable_segments()
    if device.type != "cuda":
        torch.set_num_threads(1)  # more threads do not help tiny tensors


def sections_of(sizes: Sizes, device: torch.device) -> list[Section]:

    def section(name: str, measure: Callable[[Results], None], about_s: float, limit_s: float) -> Section:
        return Section(name, measure, sizes.share * about_s, sizes.patience * limit_s)

    def single(name: str, measure: Callable[[torch.device], Any], about_s: float, limit_s: float) -> Section:
        take = partial(take_all, cells=[(name, measure)], about_s=sizes.share * about_s, device=device)
        return section(name, take, about_s, limit_s)

    def cell(name: str, mode: TrainMode, about_s: float, limit_s: float, compiled: bool = False) -> Section:
        measure = partial(steps, mode=mode, name=name, sizes=sizes, device=device, compiled=compiled)
        return section(f"steps, {mode}, {name}{', compiled' * compiled}", measure, about_s, limit_s)

    predictions = [(f"prediction, {rows} rows", partial(prediction, rows=rows)) for rows in sizes.predicted_rows]
    predict = partial(take_all, cells=predictions, about_s=sizes.share * 30, device=device)
    # Collecting all tests takes minutes.
    files = [str(path) for path in (ROOT / "tests").rglob(sizes.tests) if "mark.gpu" in path.read_text()]
    return [
        single("machine", machine, 5, 60),
        single("run", partial(whole_run, steps=sizes.steps), 90, 300),
        *(cell("ours", mode, *times) for mode in MODES for times in ((60, 200, False), (90, 300, True))),
        *(cell(name, mode, 45, 120) for mode, name in itertools.product(MODES, PEERS)),
        single("checkpoint", checkpoint, 60, 150),
        section("predictions", predict, 40, 150),
        single("live data", partial(live, rows=sizes.live_rows), 90, 200),
        single("attention", partial(attention, dtype=torch.bfloat16), 60, 200),
        single("audit_syncs", waits, 60, 150),
        single("tests", partial(gpu_tests, chosen=[*files, "-m", "gpu"]), 60, 240),
    ]


@contextlib.contextmanager
def own_ray() -> Iterator[None]:
    """Make Ray start its own cluster in every process, instead of joining one on this machine."""
    # TMPDIR may be too long: paths of Ray's sockets have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, mock.patch.dict(os.environ):
        os.environ.pop("RAY_ADDRESS", None)
        os.environ["RAY_TMPDIR"] = folder
        yield


def table(entries: dict[str, Any]) -> str:
    notes: list[str] = []
    rows: list[tuple[str, ...]] = [
        ("", "rows/s", "aimed at", "MFU", "aimed at", "memory GiB", "planned", "measured/planned")
    ]
    for name, entry in ((name, entry) for name, entry in entries.items() if name.startswith("step")):
        result = entry.get("result")
        if result is None:
            reason = entry.get("left_out") or entry.get("error", "does not fit in the memory")
            notes.append(f"{name}  {reason.splitlines()[0][:80]}")
            continue
        measured, planned = (result[key] for key in ("peak_memory_bytes", "planned_bytes"))
        aims = TARGETS.get(cast(TrainMode, name.split(", ")[1]), {}) if "ours" in name else {}
        values = (
            (result["samples_per_s"], ".1f"),
            (aims.get("rows_per_s"), "g"),
            (result["mfu"], ".1%"),
            (aims.get("mfu"), ".0%"),
            (measured and measured / GIB, ".2f"),
            (planned and planned / GIB, ".2f"),
            (measured and planned and measured / planned, ".3f"),
        )
        rows.append((name, *("-" if value is None else format(value, form) for value, form in values)))
    waits = (entries.get("audit_syncs", {}).get("result") or {}).get("waits")
    failed = [name for name, entry in entries.items() if "error" in entry]
    return "\n".join(
        [
            *format_table(rows),
            *notes,
            f"host waits between log steps: {'not known' if waits is None else len(waits)}, predicted 0",
            f"failed: {', '.join(failed) if failed else 'nothing'}",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run all sections. Return the exit status: 0 without failures, 1 a section failed, 2 no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="what does not fit into them is left out")
    parser.add_argument("--json", type=Path, required=True, help="where results go, each as soon as it is there")
    parser.add_argument("--only", nargs="+", default=[""], help="the sections whose names begin so")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, with sizes that say nothing about speed")
    options = parser.parse_args(argv)
    if not (options.tiny or torch.cuda.is_available()):
        print_safe_error("benchmarks.gpu: no CUDA device is found; --tiny runs it on a CPU")
        return 2
    device = torch.device("cpu") if options.tiny else torch.device("cuda", 0)
    sizes = TINY if options.tiny else Sizes()
    sections = sections_of(sizes, device)
    chosen = [section for section in sections if section.name.startswith(tuple(options.only))]
    if not chosen:
        names = "; ".join(section.name for section in sections)
        parser.error(f"--only {' '.join(options.only)}: no section begins so; they are {names}")
    if options.json.exists():
        parser.error(f"--json {options.json} has the results of an earlier call; name another file")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    with own_ray():
        entries = run_sections(chosen, options.json, options.minutes)
    print_safe_text(table(entries))
    print_safe(f"written to {options.json}")
    return int(any("error" in entry for entry in entries.values()))


if __name__ == "__main__":
    sys.exit(main())
