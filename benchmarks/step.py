"""Compare the speed of a training step: the naive loop, LeRobot's own update, and ours, alternately on one device.

    python -m benchmarks.step [--policy pi0] [--modes heads,expert,full] [--batch_sizes 1,2,4,8] [--rounds 3]

The policy has random weights, with its real size on a GPU and a tiny size on a CPU. The contenders are defined in
benchmarks/updates.py and get the same rows, in the form that their own loaders deliver. Naive and ours accumulate to at
least `--global_batch` rows per step; LeRobot cannot. Batch sizes grow until memory is full. MFU counts the operations
that the mode needs. Results go to benchmarks/results/step-<hardware>-<date>.json.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import math
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import RESULTS, updates
from benchmarks.updates import CAMERAS, CONTENDERS, MAX_STEPS, Columns, NotCompiledError, prompt
from diagnostics.report import format_table, medians, provenance
from diagnostics.tool import free_memory, peak_memory
from util import enable_gpu_perf_flags, peak_flops
from vla_finetuning.files import write_json
from vla_finetuning.options.programs import Config
from vla_finetuning.options.scaling import ScalingOptions
from vla_finetuning.options.train import TrainMode, TrainOptions
from vla_finetuning.policies.compiling import Compiler
from vla_finetuning.policies.counting import flops_per_sample
from vla_finetuning.policies.registry import family_of
from vla_finetuning.training.memory import GIB, StepMemory, step_memory

STORED_BATCHES, WARM_UP_STEPS, MIN_STEPS = 4, 2, 3


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(contender: Any, columns: list[Columns], accum: int, seconds: float, device: torch.device) -> dict[str, Any]:
    """Time steps of a contender at a batch size, then count the host's reads in another step.

    Raises:
        NotCompiledError: no compiled code was called although it should, or something was compiled after the warm-up.
    """
    batches = contender.feed(itertools.cycle([contender.stored(c) for c in columns]))
    numbers = itertools.count()

    def timed(steps: int) -> tuple[float, float]:
        """Return the mean seconds and CPU seconds of `steps` steps, with one log step at the end."""
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(steps):
            contender.step(batches, accum, next(numbers))
        contender.finish()
        synchronize(device)
        return (time.perf_counter() - start) / steps, (time.process_time() - cpu_start) / steps

    free_memory(device)
    timed(WARM_UP_STEPS)
    steps = min(max(MIN_STEPS, math.ceil(seconds / timed(1)[0])), MAX_STEPS)
    compiler: Compiler | None = getattr(contender, "compiler", None)
    before = (compiler.calls, compiler.compilations) if compiler else (0, 0)
    step_s, cpu_s = timed(steps)
    compiled = _compiled(compiler, *before, steps) if compiler else {}
    peak = peak_memory(device)
    with HostReads() as reads:
        contender.step(batches, accum, next(numbers))
    rows = len(columns[0]["action"]) * accum
    return {
        "rows_per_step": rows,
        "steps": steps,
        "step_s": step_s,
        "ms_per_sample": step_s / rows * 1000,
        "cpu_ms_per_sample": cpu_s / rows * 1000,
        "samples_per_s": rows / step_s,
        "host_reads_per_step": reads.count,
        "peak_memory_bytes": peak,
        **compiled,
    }


def measure_at(
    contender: Any, name: str, mode: TrainMode, size: int, rows: int, seconds: float, device: torch.device
) -> dict[str, Any]:
    """Measure a contender at batch size `size`, accumulated to `rows` rows if possible, with MFU if known."""
    config, peak = updates.policy_config(device), peak_flops(device)
    columns = [updates.prepared_rows(config, size, seed) for seed in range(STORED_BATCHES)]
    sample = measure(contender, columns, 1 if name == "lerobot" else max(1, rows // size), seconds, device)
    flops = flops_per_sample(config, CAMERAS, mode, prompt=prompt(config))
    return {**sample, "mfu": flops * sample["samples_per_s"] / peak if flops and peak else None}


def _compiled(compiler: Compiler, calls: int, compilations: int, steps: int) -> dict[str, Any]:
    """Return the calls of compiled code per step; `calls` and `compilations` are the counts before the steps."""
    called, compiled = compiler.calls - calls, compiler.compilations - compilations
    if not called:
        raise NotCompiledError(f"compiled layers were not called in {steps} steps: Dynamo skipped them without a word")
    if compiled:
        raise NotCompiledError(f"{compiled} graphs were compiled in {steps} steps, after {WARM_UP_STEPS} to warm up")
    return {"compiled_calls_per_step": called / steps}


class HostReads(TorchDispatchMode):
    """Count the host's reads of tensors: single values (`.item()`, `float()`, `if tensor`) and copies from CUDA."""

    count = 0
    ignore_compile_internals = classmethod(lambda cls: True)  # else Dynamo permanently disables compiled code

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        copied = func is torch.ops.aten._to_copy.default and args[0].is_cuda and not result.is_cuda
        self.count += copied or func is torch.ops.aten._local_scalar_dense.default
        return result


def compare(options: argparse.Namespace, device: torch.device) -> dict[TrainMode, Any]:
    """Measure contenders and batch sizes alternately in `rounds` rounds: {mode: {contender: {batch size: samples}}}."""
    modes, on_gpu = cast(list[TrainMode], options.modes.split(",")), device.type == "cuda"
    samples: dict[TrainMode, Any] = {mode: {name: {} for name in CONTENDERS} for mode in modes}
    too_large: dict[tuple[str, str], int] = {}
    for _, mode, name in itertools.product(range(options.rounds), modes, CONTENDERS):
        contender = None
        for size in map(int, options.batch_sizes.split(",")):
            if size >= too_large.get((mode, name), size + 1):
                break
            try:
                contender = contender or CONTENDERS[name](updates.policy_config(device), mode, device, on_gpu)
                sample = measure_at(contender, name, mode, size, options.global_batch, options.seconds, device)
            except torch.OutOfMemoryError:
                too_large[mode, name] = size
                print(f"{mode}, {name}: a micro-batch of {size} does not fit", flush=True)
                break
            samples[mode][name].setdefault(size, []).append(sample)
            print(f"{mode}, {name}, {size} rows: {sample['ms_per_sample']:.2f} ms/sample", flush=True)
        del contender
        free_memory(device)
    return samples


def summary(cells: dict[str, Any], mode: TrainMode, device: torch.device) -> dict[str, Any]:
    """Return medians over the rounds, and the speed-up of ours over each peer."""
    measured = {name: {str(size): medians(s) for size, s in sizes.items()} for name, sizes in cells.items()}
    best = {name: min(s["ms_per_sample"] for s in sizes.values()) for name, sizes in measured.items() if sizes}
    ratios = {}
    for peer in sorted(best.keys() - {"ours"}):
        ratios[f"{peer}, each at its best"] = best[peer] / best["ours"]
        for size in sorted(measured[peer].keys() & measured["ours"].keys(), key=int):
            theirs, its = measured[peer][size], measured["ours"][size]
            ratios[f"{peer}, both at {size}"] = theirs["ms_per_sample"] / its["ms_per_sample"]
            if device.type == "cpu":  # which other programs may use at the same time
                ratios[f"{peer}, both at {size}, in CPU time"] = theirs["cpu_ms_per_sample"] / its["cpu_ms_per_sample"]
    config = updates.policy_config(device)
    flops = flops_per_sample(config, CAMERAS, mode, prompt=prompt(config))
    return {"flops_per_sample": flops, "ours_is_faster_than": ratios, "contenders": measured}


def planned(config: Any, mode: TrainMode, size: int, accum: int, bf16: bool) -> StepMemory:
    """Return the memory of our step as `--dry_run` predicts it."""
    options = Config(
        batch_size=size,
        grad_accum=accum,
        scaling=ScalingOptions(num_workers=1),
        train=TrainOptions(mode=mode, precision="bf16" if bf16 else "fp32"),
    )
    return step_memory(family_of(config).with_cameras(config, CAMERAS, prompt(config)), options, cameras=CAMERAS)


def table(mode: str, result: dict[str, Any]) -> str:
    """Format a mode's results as a table with a line for each contender and batch size."""
    rows = [["", "batch", "ms/sample", "samples/s", "MFU", "host reads", "memory"]]
    for name, size, r in ((n, size, r) for n, sizes in result["contenders"].items() for size, r in sizes.items()):
        mfu, memory = r.get("mfu"), r.get("peak_memory_bytes")
        rows.append([name, f"{size} x {round(r['rows_per_step'] / int(size))}", f"{r['ms_per_sample']:.2f}"])
        rows[-1] += [f"{r['samples_per_s']:.1f}", "-" if mfu is None else f"{mfu:.1%}"]
        rows[-1] += [f"{r['host_reads_per_step']:.0f}", "-" if memory is None else f"{memory / GIB:.1f} GiB"]
    faster = [f"ours is {ratio:.2f}x as fast as {peer}" for peer, ratio in result["ours_is_faster_than"].items()]
    title = f"\n{mode}: {result['flops_per_sample'] / 1e9:,.2f} GFLOP per sample"
    return "\n  ".join([title, *format_table(rows), *faster])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    parser.add_argument("--policy", default="pi05", choices=("pi05", "pi0", "smolvla"))
    parser.add_argument("--modes", default="heads,expert,full")
    parser.add_argument("--batch_sizes", default="1,2,4,8,16,32,64,128" if device.type == "cuda" else "1,8")
    parser.add_argument("--global_batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="how long one measurement takes, about")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of PyTorch on the CPU")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    enable_gpu_perf_flags()
    updates.measured["policy"] = options.policy
    results = {"date": datetime.date.today().isoformat(), **provenance(**vars(options)), "modes": {}}
    with contextlib.ExitStack() as sizes:
        if options.policy != "pi05" and device.type == "cpu":  # only PI0.5 has a tiny size by options
            from tests.tiny_backbones import VOCABULARY, benchmarked

            updates.measured["vocabulary"] = VOCABULARY
            folder = Path(sizes.enter_context(tempfile.TemporaryDirectory()))
            updates.measured["options"] = sizes.enter_context(benchmarked(options.policy, folder))
        for mode, cells in compare(options, device).items():
            results["modes"][mode] = result = summary(cells, mode, device)
            print(table(mode, result), flush=True)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()}cpu"
    prefix = "" if options.policy == "pi05" else f"{options.policy}-"
    path = RESULTS / f"step-{prefix}{re.sub('[^a-z0-9]+', '-', name.lower())}-{results['date']}.json"
    write_json(path, results)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
