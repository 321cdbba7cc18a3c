"""How fast a training step is: the naive loop, LeRobot's own update, and ours, on one device in turn.

    python -m benchmarks.step [--policy pi0] [--modes heads,expert,full] [--batch_sizes 1,2,4,8] [--rounds 3]

On a GPU the policy has its real size, without one it is a tiny one; weights are random. The contenders:

* naive: the loop of the Anyscale template before its speed-up. float32 images copied synchronously from memory that is
  not pinned, `.item()` after every micro-batch, GradScaler, parameters listed anew for clipping, plain AdamW.
* lerobot: `lerobot_train.update_policy` of the installed LeRobot with its optimizer preset, through accelerate, fed
  with pinned uint8 images. On a GPU in the bfloat16 that its documentation recommends (weights and Adam's state too).
  Its preprocessor, which reads the state back from the device, is left out: tokens come ready made.
* ours: `util.train_step` with `cuda_prefetcher`, as the training loop calls it, on prompts that are cut as there; one
  log step included.
* cached, of policies that have it and modes in which the vision tower is frozen: ours as in epochs after the first with
  `--train.feature_cache`. Batches hold features of frames, as read from the cache, in place of the frames.

All are fed by the same rows, stored in the form in which each one's loader delivers them. Naive and ours accumulate to
at least `--global_batch` rows per step; LeRobot cannot. Batch sizes grow until memory is full. MFU counts the
operations that the mode needs; extra ones do not count. Results go to benchmarks/results/step-<hardware>-<date>.json; a
table is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import itertools
import math
import os
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import RESULTS
from benchmarks.updates import (
    CAMERAS,
    CONTENDERS,
    MAX_STEPS,
    OWN,
    Columns,
    NotCompiledError,
    contenders,
    measured,
    policy_config,
    prepared_rows,
    prompt,
)
from diagnostics.report import Environment
from util import (
    enable_gpu_perf_flags,
    peak_flops,
)
from vla_finetuning.files import write_json
from vla_finetuning.options.programs import Config
from vla_finetuning.options.train import TrainMode
from vla_finetuning.policies.compiling import Compiler
from vla_finetuning.policies.counting import flops_per_sample
from vla_finetuning.policies.registry import family_of
from vla_finetuning.training.memory import StepMemory, step_memory

STORED_BATCHES = 4
WARM_UP_STEPS = 2
MIN_STEPS = 3
# Calls of CUDA's in which the host waits. A copy from memory that is not pinned is one of them.
WAITS = re.compile(r"cuda(Stream|Device|Event)Synchronize|cudaMemcpy(Async)?")


# ---- measuring ------------------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(contender: Any, columns: list[Columns], accum: int, seconds: float, device: torch.device) -> dict[str, Any]:
    """Steps of one contender at one batch size, timed as a whole; then one more to see where the host waits.

    Raises:
        NotCompiledError: its layers are to be compiled, and no compiled code was called, or something was compiled
            after the warm-up.
    """
    rows = len(columns[0]["action"])
    batches = contender.feed(itertools.cycle([contender.stored(c) for c in columns]))
    numbers = itertools.count()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(WARM_UP_STEPS):
        contender.step(batches, accum, next(numbers))
    synchronize(device)
    start = time.perf_counter()
    contender.step(batches, accum, next(numbers))
    synchronize(device)
    steps = min(max(MIN_STEPS, math.ceil(seconds / (time.perf_counter() - start))), MAX_STEPS)
    contender.finish()

    compiler: Compiler | None = getattr(contender, "compiler", None)
    calls, compilations = (compiler.calls, compiler.compilations) if compiler else (0, 0)
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(steps):
        contender.step(batches, accum, next(numbers))
    contender.finish()
    synchronize(device)
    step_s, cpu_s = (time.perf_counter() - start) / steps, (time.process_time() - cpu_start) / steps
    compiled = _compiled(compiler, calls, compilations, steps) if compiler else {}
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    reads = HostReads()
    with reads:
        contender.step(batches, accum, next(numbers))
    return {
        "rows_per_step": rows * accum,
        "steps": steps,
        "step_s": step_s,
        "ms_per_sample": step_s / (rows * accum) * 1000,
        "cpu_ms_per_sample": cpu_s / (rows * accum) * 1000,
        "samples_per_s": rows * accum / step_s,
        "host_reads_per_step": reads.count,
        "host_blocked": host_blocked(contender, batches, next(numbers), device),
        "peak_memory_bytes": peak,
        **compiled,
    }


def _compiled(compiler: Compiler, calls: int, compilations: int, steps: int) -> dict[str, Any]:
    """Return how often compiled code was called in so many steps. The numbers are what they were before."""
    called, compiled = compiler.calls - calls, compiler.compilations - compilations
    if compiler.failed or not called:
        why = "compiling failed, as a warning says" if compiler.failed else "Dynamo skipped them without a word"
        raise NotCompiledError(f"compiled layers were called {called} times in {steps} steps: {why}")
    if compiled:
        raise NotCompiledError(f"{compiled} graphs were compiled in {steps} steps, after {WARM_UP_STEPS} to warm up")
    return {"compiled_calls_per_step": called / steps}


class HostReads(TorchDispatchMode):
    """Counts what the host reads of tensors: single values (`.item()`, `float()`, `if tensor`), copies from CUDA."""

    count = 0
    ignore_compile_internals = classmethod(lambda cls: True)  # else Dynamo gives up what is compiled, for good

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        copied = func is torch.ops.aten._to_copy.default and args[0].is_cuda and not result.is_cuda
        self.count += copied or func is torch.ops.aten._local_scalar_dense.default
        return result


def host_blocked(contender: Any, batches: Iterator[Any], number: int, device: torch.device) -> float | None:
    """The share of a step of one micro-batch in which the host waits inside CUDA calls; None without CUDA.

    Of the profiler's raw events: making its table of a step of 300,000 takes half a minute.
    """
    on_gpu = device.type == "cuda"
    synchronize(device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler, record_function("the step"):
        contender.step(batches, 1, number)
    recorded: Any = profiler.profiler
    events = recorded.kineto_results.events()
    # On the device there may be another of that name, for what the host began meanwhile.
    step = next(e for e in events if e.name() == "the step" and e.device_type() == torch.autograd.DeviceType.CPU)
    waits = [e for e in events if WAITS.fullmatch(e.name()) and step.start_ns() <= e.start_ns() < step.end_ns()]
    return sum(wait.duration_ns() for wait in waits) / step.duration_ns() if on_gpu else None


def compare(options: argparse.Namespace, device: torch.device, bf16: bool, rows: int) -> dict[TrainMode, Any]:
    """Each contender at each batch size, in turn, `rounds` times: {mode: {contender: {batch size: samples}}}."""
    modes = cast(list[TrainMode], options.modes.split(","))
    samples: dict[TrainMode, Any] = {mode: {name: {} for name in CONTENDERS} for mode in modes}
    too_large: dict[tuple[str, str], int] = {}
    for _, mode, name in itertools.product(range(options.rounds), modes, CONTENDERS):
        if name not in contenders(policy_config(device), mode):
            continue
        contender = CONTENDERS[name](policy_config(device), mode, device, bf16)
        for size in map(int, options.batch_sizes.split(",")):
            if size >= too_large.get((mode, name), size + 1):
                break
            columns = [prepared_rows(policy_config(device), size, seed) for seed in range(STORED_BATCHES)]
            accum = 1 if name == "lerobot" else max(1, rows // size)
            try:
                sample = measure(contender, columns, accum, options.seconds, device)
            except torch.OutOfMemoryError:
                too_large[mode, name] = size
                print(f"{mode}, {name}: a micro-batch of {size} does not fit", flush=True)
                break
            samples[mode][name].setdefault(size, []).append(sample)
            print(f"{mode}, {name}, {size} x {accum}: {sample['ms_per_sample']:.2f} ms/sample", flush=True)
        del contender
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return samples


def summary(cells: dict[str, Any], mode: TrainMode, device: torch.device) -> dict[str, Any]:
    """Medians over the rounds, MFU, and how many times faster ours is, by cached features too."""
    config, peak = policy_config(device), peak_flops(device)
    flops_of_all = flops_per_sample(config, CAMERAS, mode, prompt=prompt(config))
    counts = {"flops_per_sample": flops_of_all}
    if cells["cached"]:
        counts["flops_with_features"] = flops_per_sample(config, CAMERAS, mode, prompt=prompt(config), features=True)
    medians: dict[str, dict[str, Any]] = {}
    for name, sizes in cells.items():
        medians[name] = {}
        for size, samples in sizes.items():
            keys = [key for key, value in samples[0].items() if value is not None]
            median = {key: statistics.median(sample[key] for sample in samples) for key in keys}
            flops = counts["flops_with_features"] if name == "cached" else flops_of_all
            median["mfu"] = flops * median["samples_per_s"] / peak if flops and peak else None
            medians[name][str(size)] = {**median, "samples": samples}
    best = {name: min(sizes.values(), key=lambda s: s["ms_per_sample"]) for name, sizes in medians.items() if sizes}
    faster = {}
    for variant in [name for name in OWN if name in best]:
        ratios = {}
        for peer in best.keys() - set(OWN):
            ratios[f"{peer}, each at its best"] = best[peer]["ms_per_sample"] / best[variant]["ms_per_sample"]
            for size in medians[peer].keys() & medians[variant].keys():
                theirs, its = medians[peer][size], medians[variant][size]
                ratios[f"{peer}, both at {size}"] = theirs["ms_per_sample"] / its["ms_per_sample"]
                if device.type == "cpu":  # which other programs may use too
                    cpu = theirs["cpu_ms_per_sample"] / its["cpu_ms_per_sample"]
                    ratios[f"{peer}, both at {size}, in CPU time"] = cpu
        if smallest := next(iter(medians["naive"].values()), None):
            ratios["naive at its smallest"] = smallest["ms_per_sample"] / best[variant]["ms_per_sample"]
        faster[f"{variant}_is_faster_than"] = dict(sorted(ratios.items()))
    return {**counts, **faster, "contenders": medians}


def planned(
    config: Any,
    mode: TrainMode,
    size: int,
    accum: int,
    bf16: bool,
) -> StepMemory:
    """Return what `--dry_run` says that a step of ours takes."""
    return step_memory(
        family_of(config).with_cameras(config, CAMERAS, prompt(config)),
        mode,
        cameras=CAMERAS,
        batch_size=size,
        grad_accum=accum,
        draws=1,
        bf16=bf16,
        attention=Config().train.attention,
        checkpointing=False,
    )


# ---- results --------------------------------------------------------------------------------------------------------


def table(mode: str, result: dict[str, Any]) -> str:
    lines = [f"\n{mode}: {result['flops_per_sample'] / 1e9:,.2f} GFLOP per sample"]
    if "flops_with_features" in result:
        lines[0] += f", {result['flops_with_features'] / 1e9:,.2f} with cached features"
    head = ("", "batch", "ms/sample", "samples/s", "MFU", "host reads", "host blocked", "memory")
    lines.append(f"  {head[0]:10}" + "".join(f"{column:>14}" for column in head[1:]))
    for name, sizes in result["contenders"].items():
        for size, r in sizes.items():
            accum = round(r["rows_per_step"] / int(size))
            blocked, memory = r.get("host_blocked"), r.get("peak_memory_bytes")
            cells = (
                f"{size} x {accum}",
                f"{r['ms_per_sample']:.2f}",
                f"{r['samples_per_s']:.1f}",
                "-" if r["mfu"] is None else f"{r['mfu']:.1%}",
                f"{r['host_reads_per_step']:.0f}",
                "-" if blocked is None else f"{blocked:.0%}",
                "-" if memory is None else f"{memory / 2**30:.1f} GiB",
            )
            lines.append(f"  {name:10}" + "".join(f"{cell:>14}" for cell in cells))
    for variant in OWN:
        ratios = result.get(f"{variant}_is_faster_than", {}).items()
        lines += [f"  {variant} is {ratio:.2f}x as fast as {peer}" for peer, ratio in ratios]
    return "\n".join(lines)


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
    measured["policy"] = options.policy
    with contextlib.ExitStack() as sizes:
        if options.policy != "pi05" and device.type == "cpu":  # LeRobot's own options have no such sizes
            from tests.tiny_backbones import VOCABULARY, benchmarked

            measured["vocabulary"] = VOCABULARY
            folder = Path(sizes.enter_context(tempfile.TemporaryDirectory()))
            measured["options"] = sizes.enter_context(benchmarked(options.policy, folder))
        run(options, device)


def run(options: argparse.Namespace, device: torch.device) -> None:
    """Measure, print and write."""
    bf16, rows = device.type == "cuda", options.global_batch

    name = torch.cuda.get_device_name(device) if bf16 else f"{os.cpu_count()}cpu"
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(sys.orig_argv[1:]),
        "hardware": {**Environment.here().model_dump(), "threads": torch.get_num_threads(), "cuda": torch.version.cuda},
        "policy": type(policy_config(device)).__name__,
        "settings": vars(options),
        "modes": {},
    }
    compared_by_mode = compare(options, device, bf16, rows)
    for mode, cells in compared_by_mode.items():
        result = summary(cells, mode, device)
        results["modes"][mode] = result
        print(table(mode, result), flush=True)
    prefix = "" if options.policy == "pi05" else f"{options.policy}-"
    path = RESULTS / f"step-{prefix}{re.sub('[^a-z0-9]+', '-', name.lower())}-{results['date']}.json"
    write_json(path, results)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
