"""What a training step of PI0.5 issues, moves and keeps, counted at its real size: no GPU, nothing is measured.

    python -m benchmarks.counts --json benchmarks/results/counts.json [--before OTHER.json]

One row, 3 cameras, prompts of 96 tokens, bf16, on one GPU, run on tensors without storage: operations of a micro-batch
and of the optimizer that run a kernel when nothing is compiled; bytes that those move that multiply nothing; and how
much of a token of an image forward keeps for backward, as the difference that a camera's 256 tokens make. `--before`
takes the result of another revision into the file.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from diagnostics.report import Environment
from diagnostics.step_prediction import CAMERAS, policy_to_predict
from vla_finetuning.config import TrainMode
from vla_finetuning.files import read_json, write_json
from vla_finetuning.terminal import tell
from vla_finetuning.training.memory import StepMemory, step_memory
from vla_finetuning.training.step_time import Operations

TOKENS_OF_A_CAMERA = 256
MODES: tuple[TrainMode, ...] = ("full", "expert")


def counted(mode: TrainMode, cameras: int = CAMERAS) -> tuple[StepMemory, Operations]:
    operations = Operations()
    options: dict[str, Any] = {"cameras": cameras, "batch_size": 1, "grad_accum": 1, "draws": 1, "bf16": True}
    policy = policy_to_predict("pi05", cameras)
    return step_memory(
        policy, mode, **options, attention="sdpa", checkpointing=False, operations=operations
    ), operations


def kept_bytes(more: StepMemory, less: StepMemory) -> float:
    """Of a token of an image, by steps of which one has a camera more."""
    return (more.saved - less.saved) / TOKENS_OF_A_CAMERA


def count(mode: TrainMode) -> dict[str, Any]:
    memory, operations = counted(mode)
    fewer, _ = counted(mode, CAMERAS - 1)
    issued = Counter(operation.phase for operation in operations.found)
    moved = sum(operation.bytes for operation in operations.found if operation.kind == "memory")
    return {
        "operations": dict(issued),
        "memory_bound_bytes": moved,
        "kept_bytes_per_image_token": kept_bytes(memory, fewer),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--before", type=Path, help="a result of another revision")
    options = parser.parse_args()
    found = {mode: count(mode) for mode in MODES}
    for mode, each in found.items():
        issued = ", ".join(f"{phase} {number}" for phase, number in each["operations"].items())
        tell(
            f"{mode}: operations {issued}; {each['memory_bound_bytes'] / 1e9:.1f} GB moved without multiplying; "
            f"{each['kept_bytes_per_image_token'] / 2**20:.3f} MiB kept of a token of an image"
        )
    if options.json is not None:
        environment = Environment.here().model_dump(mode="json")
        result: dict[str, Any] = {"command": shlex.join(sys.orig_argv[1:]), "environment": environment, "modes": found}
        if options.before is not None:
            result["before"] = read_json(options.before)
        write_json(options.json, result)


if __name__ == "__main__":
    main()
