"""What a GPU says of everything that was predicted without one: one command, for the day that there is one.

    python -m benchmarks.gpu --minutes 20 --json FILE [--tiny]

In this order: the machine; every attention kernel at every length of prompts, forward and backward; what waits for the
device between two log steps; the tests marked `gpu`; the training step of the three modes, eager and compiled, at batch
sizes up to what the plan's memory allows, with LeRobot's own update and the naive loop beside it (benchmarks/step.py);
a checkpoint and its resume; prediction as evaluation does it; the live data engine on the machine's cores; a whole run
of the program with a resume. PI0.5 has its real size and random weights; the whole run is the demo's.

Each result is in FILE as soon as it is there. What fails is recorded and does not end the others; what no longer fits
into the minutes is left out, and recorded too. At the end a table of what was predicted and what was measured. `--tiny`
runs all of it on a CPU, at sizes that say nothing about speed.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks import step
from diagnostics.audit_syncs import audit
from diagnostics.report import Environment
from util import enable_gpu_perf_flags, peak_flops
from vla_finetuning.config import TrainMode
from vla_finetuning.files import read_json, read_lines, write_json
from vla_finetuning.flags import parse_args
from vla_finetuning.policies.attention import CANDIDATES, UNAVAILABLE, Kernel, choose_kernel, what_is_wrong
from vla_finetuning.policies.compiling import Compiler, why_not
from vla_finetuning.policies.counting import flops_per_sample, meta_policy
from vla_finetuning.policies.processors import DeviceHalf
from vla_finetuning.policies.prompts import ALIGNMENT
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.trainable import choose_trainable
from vla_finetuning.run.checkpoint import (
    OPTIMIZER,
    TRAINABLE,
    Piece,
    Progress,
    Staging,
    commit,
    load_checkpoint,
    write_pieces,
)
from vla_finetuning.run.folder import EVALUATION_NAME, METRICS_NAME
from vla_finetuning.run.resolve import resolve
from vla_finetuning.terminal import tell, tell_error, tell_text
from vla_finetuning.training.capacity import fits
from vla_finetuning.training.memory import GIB

ROOT = Path(__file__).resolve().parent.parent
ACCUMULATED_ROWS = 8
# What is aimed at on one H100: rows/s and MFU of a mode.
TARGETS: dict[TrainMode, dict[str, float]] = {"full": {"rows_per_s": 30, "mfu": 0.45}, "expert": {"rows_per_s": 90}}


@dataclass(frozen=True)
class Sizes:
    """How much is measured. `about_s`: what a measurement of each kind takes, by which it is begun or left out."""

    batch_sizes: tuple[int, ...] = (1, 4, 8, 16, 32, 64)
    peers_at: tuple[int, ...] = (1, 4, 8, 16)
    seconds: float = 3.0
    steps: int = 200
    live_rows: int = step.LIVE_ROWS
    predicted_rows: tuple[int, ...] = (1, 8, 32)
    tests: str = "tests"
    about_s: dict[str, float] = field(
        default_factory=lambda: {
            "machine": 1.0,
            "plan": 40.0,
            "attention": 90.0,
            "audit": 60.0,
            "tests": 120.0,
            "step": 40.0,
            "compiled": 150.0,
            "checkpoint": 60.0,
            "prediction": 40.0,
            "live": 90.0,
            "run": 120.0,
        }
    )


TINY = Sizes(
    batch_sizes=(1, 2),
    peers_at=(2,),
    seconds=0.0,
    steps=4,
    live_rows=step.LIVE_ROWS // 4,
    predicted_rows=(2,),
    tests="tests/test_util.py",
    about_s=dict.fromkeys(Sizes().about_s, 5.0),
)


class Results:
    """Measurements by name, in a file from the moment that each is there."""

    def __init__(self, path: Path, minutes: float, about_s: dict[str, float]):
        self.path, self._about_s = path, about_s
        self._ends = time.monotonic() + 60 * minutes
        self.found: dict[str, Any] = {}

    @property
    def left_s(self) -> float:
        return self._ends - time.monotonic()

    def take(self, name: str, kind: str, measure: Callable[[], Any]) -> Any:
        """Measure, and write it down: the result, why there is none, or that there is no time. Returns the result."""
        needed = self._about_s[kind]
        entry: dict[str, Any] = {}
        if self.left_s < needed:
            entry = {"left_out": f"takes about {needed:g} s, and {max(self.left_s, 0):.0f} s are left"}
        else:
            started = time.monotonic()
            try:
                entry = {"result": measure()}
            except Exception as error:
                entry = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
            entry["seconds"] = time.monotonic() - started
        self.write(name, entry)
        gc.collect()
        torch.cuda.empty_cache()
        return entry.get("result")

    def write(self, name: str, entry: dict[str, Any]) -> None:
        self.found[name] = entry
        write_json(self.path, self.found)
        said = entry.get("error") or entry.get("left_out") or json.dumps(entry["result"])
        tell(f"{name}: {said[:300]}")


# ---- what is measured -----------------------------------------------------------------------------------------------


def machine(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {**Environment.here().model_dump(), "cuda": torch.version.cuda}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "capability": list(torch.cuda.get_device_capability(device)),
            "gpu_memory_bytes": properties.total_memory,
            "peak_flops": peak_flops(device),
        }
    return found


def attention(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Every kernel at every length that prompts could have, also those that `prompt_lengths` keeps away from."""
    config = step.policy_config(device)
    policy = meta_policy(config)
    choose_trainable(policy, "full")
    loss = family_of(config).make_loss(policy, attention="sdpa")
    lengths = range(ALIGNMENT, config.tokenizer_max_length + 1, ALIGNMENT)
    shapes = loss.attentions(step.CAMERAS, lengths)
    found: dict[str, Any] = {}
    for kernel in CANDIDATES[:-1]:
        wrong = {str(shape): what_is_wrong(kernel, [(layer, shape)], device, dtype) for layer, shape in shapes[:1]}
        if UNAVAILABLE in wrong.values():
            found[kernel] = UNAVAILABLE
            continue
        wrong |= {str(shape): what_is_wrong(kernel, [(layer, shape)], device, dtype) for layer, shape in shapes[1:]}
        found[kernel] = {"shapes": len(wrong), "wrong": {shape: reason for shape, reason in wrong.items() if reason}}
    used = loss.attentions(step.CAMERAS, step.prompt_lengths(config))
    chosen = choose_kernel("sdpa", used, device, dtype)
    return {"kernels": found, "chosen": chosen.kernel, "backends": chosen.backends, "refused": chosen.refused}


def demo_flags(device: torch.device, folder: Path) -> list[str]:
    use_gpu = "true" if device.type == "cuda" else "false"
    return ["--preset=demo", f"--output_dir={folder}", "--scaling.num_workers=1", f"--scaling.use_gpu={use_gpu}"]


def waits(device: torch.device) -> dict[str, Any]:
    """What waits for the device between two log steps of the demo's run."""
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        found = audit(resolve(parse_args(demo_flags(device, Path(folder))), torch.cuda.device_count()))
    lines = [f"{sync.operation} at {sync.where}, {sync.times} times" for sync in found.syncs]
    return {"looked_at": found.seen, "steps": found.steps, "waits": lines}


def gpu_tests(where: str, left_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", where, "-m", "gpu", "-q", "-p", "no:cacheprovider", "--no-header"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=left_s)
    return {"status": done.returncode, "tail": done.stdout.splitlines()[-20:]}


def measure_step(contender: Any, device: torch.device, mode: TrainMode, size: int, seconds: float) -> dict[str, Any]:
    config, accum = step.policy_config(device), max(1, ACCUMULATED_ROWS // size)
    accum = 1 if isinstance(contender, step.LeRobot) else accum
    columns = [step.prepared_rows(config, size, seed) for seed in range(step.STORED_BATCHES)]
    sample = step.measure(contender, columns, accum, seconds, device)
    flops = flops_per_sample(config, step.CAMERAS, mode, prompt=step.prompt(config))
    peak = peak_flops(device)
    return {**sample, "mfu": flops * sample["samples_per_s"] / peak if flops and peak else None}


def fitting(mode: TrainMode, batch_sizes: Sequence[int], device: torch.device, bf16: bool) -> dict[int, int]:
    """The batch sizes that fit the device as the plan has it, each with the bytes that its step is said to take."""
    gib = torch.cuda.get_device_properties(device).total_memory / GIB if device.type == "cuda" else None
    planned: dict[int, int] = {}
    for size in batch_sizes:
        accum = max(1, ACCUMULATED_ROWS // size)
        needed = step.planned(step.policy_config(device), mode, size, accum, bf16)
        if gib is not None and not fits(needed, gib):
            break
        planned[size] = needed.peak
    return planned


def steps(results: Results, sizes: Sizes, device: torch.device, bf16: bool, kernel: Kernel) -> None:
    """Each mode: ours eager and compiled, LeRobot's and the naive loop, in one process, at growing batch sizes."""
    for mode in get_args(TrainMode):
        planned = results.take(f"plan, {mode}", "plan", partial(fitting, mode, sizes.batch_sizes, device, bf16)) or {}

        def ours(mode: TrainMode = mode, compiled: bool = False) -> Any:
            compiler = Compiler() if compiled else None
            return step.Ours(step.policy_config(device), mode, device, bf16, attention=kernel, compiler=compiler)

        _at_sizes(results, f"step, {mode}, ours", "step", ours, mode, planned, device, sizes)
        if reason := why_not(device):
            results.write(f"step, {mode}, ours, compiled", {"left_out": reason})
        elif planned:
            # The sizes of interest: one that is bound by launches, and the largest.
            ends = {size: planned[size] for size in {min(planned), max(planned)}}
            name = f"step, {mode}, ours, compiled"
            _at_sizes(results, name, "compiled", partial(ours, compiled=True), mode, ends, device, sizes)
        for name in ("lerobot", "naive"):

            def peer(mode: TrainMode = mode, name: str = name) -> Any:
                return step.CONTENDERS[name](step.policy_config(device), mode, device, bf16)

            at = dict.fromkeys(sizes.peers_at)
            _at_sizes(results, f"step, {mode}, {name}", "step", peer, mode, at, device, sizes)


def _at_sizes(
    results: Results,
    name: str,
    kind: str,
    make: Callable[[], Any],
    mode: TrainMode,
    planned: dict[int, Any],
    device: torch.device,
    sizes: Sizes,
) -> None:
    """One contender, made once, at growing batch sizes, until one of them fails."""
    made: list[Any] = []

    def measured(size: int) -> dict[str, Any]:
        if not made:
            made.append(make())
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        return {**measure_step(made[0], device, mode, size, sizes.seconds), "planned_bytes": planned[size]}

    for size in sorted(planned):
        if results.take(f"{name}, {size} rows", kind, partial(measured, size)) is None:
            break
    made.clear()
    gc.collect()
    torch.cuda.empty_cache()


def checkpoint(device: torch.device, bf16: bool, mode: TrainMode = "expert") -> dict[str, Any]:
    """Write what trains after a step, read it into other weights, and see that it is the same, bit for bit."""
    config, rows = step.policy_config(device), 2
    contender = step.Ours(config, mode, device, bf16)
    columns = [step.prepared_rows(config, rows, seed=0)]
    batches = contender.feed(itertools.cycle([contender.stored(c) for c in columns]))
    contender.step(batches, 1, 0)
    named, state = contender.optimizer.named(), contender.optimizer.state()
    step.synchronize(device)
    staging, marks = Staging({**named, **state}), [time.perf_counter()]
    for _ in range(2):  # the first one waits for the memory too, which a run makes while training begins
        taken = {
            kind: {key: Piece(staging.copied(key, value), (0,) * value.ndim) for key, value in tensors.items()}
            for kind, tensors in ((TRAINABLE, named), (OPTIMIZER, state))
        }
        step.synchronize(device)
        marks.append(time.perf_counter())
    copied = marks[-1]
    with tempfile.TemporaryDirectory(prefix="gpu-") as name:
        folder = Path(name) / "step_00000001"
        commit(folder, Progress(1, rows, {}, {}, mode, rows), write_pieces(folder, taken))
        written = time.perf_counter()
        for tensor in (*named.values(), *state.values()):
            tensor.zero_()
        load_checkpoint(folder, named, state)
        step.synchronize(device)
    loaded = time.perf_counter()
    same = all(
        torch.equal(tensors[key].cpu(), piece.values)
        for kind, tensors in ((TRAINABLE, named), (OPTIMIZER, state))
        for key, piece in taken[kind].items()
    )
    size = sum(piece.values.nbytes for pieces in taken.values() for piece in pieces.values())
    staging.close()
    return {
        "mode": mode,
        "bytes": size,
        "memory_made_s": max(0.0, 2 * marks[1] - marks[0] - copied),
        "pause_s": copied - marks[1],
        "write_s": written - copied,
        "read_s": loaded - written,
        "same_bits": same,
    }


def prediction(device: torch.device, rows: int) -> dict[str, Any]:
    """One batch of chunks, as the open-loop evaluation predicts them."""
    config = step.policy_config(device)
    policy = step.make_policy(config, "heads", device).eval()
    columns = step.prepared_rows(config, rows, seed=0)
    batch = DeviceHalf(None, config)({key: torch.from_numpy(value).to(device) for key, value in columns.items()})
    seconds = []
    for _ in range(2):  # once to warm up
        step.synchronize(device)
        started = time.perf_counter()
        with torch.inference_mode():
            policy.predict_action_chunk(batch)
        step.synchronize(device)
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"rows": rows, "rows_per_s": rows / seconds[-1], "peak_memory_bytes": peak}


def whole_run(device: torch.device, steps: int) -> dict[str, Any]:
    """The program, from the command line to the evaluation: half of the demo's steps, then a resume to the end."""
    import vla

    half = max(1, steps // 2)
    with tempfile.TemporaryDirectory(prefix="gpu-") as name:
        folder = Path(name) / "run"
        first = [*demo_flags(device, folder), f"--steps={half}", f"--save_freq={half}", "--log_freq=2"]
        statuses = [vla.main(first), vla.main([f"--output_dir={folder}", "--resume", f"--steps={steps}"])]
        lines = [json.loads(line) for line in read_lines(folder / METRICS_NAME)]
        evaluation = read_json(folder / EVALUATION_NAME)
    last = lines[-1] if lines else {}
    keys = ("step", "loss", "samples_per_s", "step_s", "data_wait_s", "mfu", "peak_memory_bytes", "checkpoint_pause_s")
    errors = {name: (evaluation.get("trained", {}).get(name) or {}).get("mse") for name in ("policy", "mean_action")}
    return {"statuses": statuses, "steps": [line["step"] for line in lines], **{k: last.get(k) for k in keys}, **errors}


# ---- all of it ------------------------------------------------------------------------------------------------------


def measure_all(results: Results, sizes: Sizes, device: torch.device) -> None:
    bf16 = device.type == "cuda"
    results.take("machine", "machine", lambda: machine(device))
    probe = results.take("attention", "attention", lambda: attention(device, torch.bfloat16))
    kernel: Kernel = probe["chosen"] if probe else "sdpa"
    results.take("audit_syncs", "audit", lambda: waits(device))
    results.take("tests", "tests", lambda: gpu_tests(sizes.tests, results.left_s))
    enable_gpu_perf_flags()
    steps(results, sizes, device, bf16, kernel)
    results.take("checkpoint", "checkpoint", lambda: checkpoint(device, bf16))
    for rows in sizes.predicted_rows:
        results.take(f"prediction, {rows} rows", "prediction", partial(prediction, device, rows))
    size, seconds = sizes.batch_sizes[1], 10 * sizes.seconds
    results.take("live data", "live", lambda: step.live("expert", device, bf16, size, 1, seconds, sizes.live_rows))
    results.take("run", "run", lambda: whole_run(device, sizes.steps))


def table(found: dict[str, Any]) -> str:
    """What was predicted, beside what was measured."""
    rows = [("", "rows/s", "aimed at", "MFU", "aimed at", "memory", "planned", "measured/planned")]
    for name, entry in found.items():
        if not name.startswith("step, "):
            continue
        result = entry.get("result")
        if result is None:
            rows.append((name, entry.get("left_out") or entry["error"].splitlines()[0][:80], *[""] * 6))
            continue
        measured, planned = result["peak_memory_bytes"], result["planned_bytes"]
        of_mode = TARGETS.get(name.split(", ")[1], {}) if "ours" in name else {}  # type: ignore[call-overload]
        rows.append(
            (
                name,
                f"{result['samples_per_s']:.1f}",
                f"{of_mode['rows_per_s']:g}" if "rows_per_s" in of_mode else "",
                "-" if result["mfu"] is None else f"{result['mfu']:.1%}",
                f"{of_mode['mfu']:.0%}" if "mfu" in of_mode else "",
                "-" if measured is None else f"{measured / 2**30:.2f} GiB",
                "-" if planned is None else f"{planned / 2**30:.2f} GiB",
                "-" if None in (measured, planned) else f"{measured / planned:.3f}",
            )
        )
    widths = [max(len(row[i]) for row in rows if row[2:] != ("",) * 6 or i == 0) for i in range(8)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    waits = (found.get("audit_syncs", {}).get("result") or {}).get("waits")
    lines.append(f"host waits between log steps: {'not known' if waits is None else len(waits)}, predicted 0")
    failed = [name for name, entry in found.items() if "error" in entry]
    lines.append(f"failed: {', '.join(failed) if failed else 'nothing'}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 all was measured or left out for want of time, 1 something failed, 2 no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="what does not fit into them is left out")
    parser.add_argument("--json", type=Path, required=True, help="where results go, each as soon as it is there")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, with sizes that say nothing about speed")
    options = parser.parse_args(argv)
    if not (options.tiny or torch.cuda.is_available()):
        tell_error("benchmarks.gpu: no CUDA device is found; --tiny runs it on a CPU")
        return 2
    device = torch.device("cpu") if options.tiny else torch.device("cuda", 0)
    sizes = TINY if options.tiny else Sizes()
    results = Results(options.json, options.minutes, sizes.about_s)
    if options.tiny:
        torch.set_num_threads(1)  # of so little, more would only wait for each other
    measure_all(results, sizes, device)
    tell_text(table(results.found))
    tell(f"written to {options.json}")
    return int(any("error" in entry for entry in results.found.values()))


if __name__ == "__main__":
    sys.exit(main())
