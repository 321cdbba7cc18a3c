"""What fits where: the memory that each preset is planned to take of its GPU, PI0.5 at its real size.

    python -m benchmarks.presets [--presets l4,h100] [--one_gpu] [--measured FILE] [--json FILE]

For 1, 2 and 3 cameras of 480x640 and prompts of 200 tokens, in the mode that the preset names and those that train
less; GiB per worker of the GiB that CUDA reports, by the plan that refuses a run which does not fit. Nothing is
allocated: shapes are traced on the meta device, a minute or two for each preset. `--measured` takes what `python -m
benchmarks.gpu` has written and says what it found of the plan; without it all of it is planned and nothing measured.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from lerobot.configs import PreTrainedConfig
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.utils.constants import ACTION

from diagnostics.environment import Environment
from vla_finetuning.cards import CARDS_GIB, OF_PRESET
from vla_finetuning.config import PRESETS, Config, PeftOptions, TrainMode
from vla_finetuning.files import read_json, write_json
from vla_finetuning.flags import parse_args, parse_grpo
from vla_finetuning.policies.registry import family_of
from vla_finetuning.terminal import tell, tell_text
from vla_finetuning.training.capacity import needed_by
from vla_finetuning.training.memory import GIB, StepMemory

PLACES = ("--dataset.root=d", "--output_dir=o")
CAMERAS, FRAME_BYTES, PROMPT = (1, 2, 3), 480 * 640 * 3, 200
# GPUs that people have one of: what CUDA reports of those sold with 16 and 24 GB, at the least.
ONE_GPU_GIB = {"16 GB": 15.5, "24 GB": CARDS_GIB["L4"]}
ONE_GPU_ROWS = (1, 8)
EVERYWHERE = r".*(language_model|gemma_expert).*\.(q_proj|k_proj|v_proj|o_proj)"
ONE_GPU_WAYS: dict[str, tuple[TrainMode, PeftOptions, bool]] = {
    "`--train.mode heads`": ("heads", PeftOptions(), False),
    "`--train.mode expert`": ("expert", PeftOptions(), False),
    "`--peft.r 16` (adapters in the expert)": ("expert", PeftOptions(method_type="lora"), False),
    "`--peft.r 16`, all attention (`--peft.target_modules`)": (
        "expert",
        PeftOptions(method_type="lora", target_modules=EVERYWHERE),
        False,
    ),
    "the same with `--train.activation_checkpointing`": (
        "expert",
        PeftOptions(method_type="lora", target_modules=EVERYWHERE),
        True,
    ),
}
MODES: tuple[TrainMode, ...] = get_args(TrainMode)  # from what trains least


def modes_of(preset: str) -> tuple[TrainMode, ...]:
    """What a preset is meant for: the mode that it names, and those that train less."""
    return MODES[: MODES.index(PRESETS[preset]["train.mode"]) + 1]  # type: ignore[arg-type]  # a preset names a mode


def config_of(preset: str, mode: TrainMode) -> Config:
    """The options of a run with the preset."""
    return parse_args([f"--preset={preset}", f"--train.mode={mode}", "--policy.type=pi05", *PLACES])


def planned(preset: str, mode: TrainMode, cameras: int) -> StepMemory:
    """What a worker of a run with the preset needs."""
    return planned_for(config_of(preset, mode), cameras)


def planned_grpo(preset: str, cameras: int) -> StepMemory:
    """What a worker needs of a run of `grpo.py` with the preset, whose micro-batches have all random steps of a row."""
    config = parse_grpo([f"--preset={preset}", "--policy.path=p", "--env.type=two_bins", "--output_dir=o"])
    training = config.training()
    train = replace(training.train, noise_draws=config.grpo.flow_steps)
    return planned_for(replace(training, train=train), cameras)


def planned_for(config: Config, cameras: int) -> StepMemory:
    """What a worker needs of a run of PI0.5 with these options, from pretrained weights."""
    make: Any = PreTrainedConfig.get_choice_class("pi05")
    policy = make(device="cpu", pretrained_path=Path("pi05_base"))
    policy.output_features = {ACTION: PolicyFeature(FeatureType.ACTION, (policy.max_action_dim,))}
    policy = family_of(policy).with_cameras(policy, cameras, PROMPT)
    return needed_by(config, policy, cameras=cameras, frame_bytes=cameras * FRAME_BYTES)


def evidence(measured: Mapping[str, Any], mode: TrainMode) -> str:
    """What a GPU has said of the plan for a mode: the ratios of its peaks to what was planned."""
    ratios = [
        found["result"]["peak_memory_bytes"] / found["result"]["planned_bytes"]
        for name, found in measured.items()
        if name.startswith(f"step, {mode}, ours") and found.get("result", {}).get("peak_memory_bytes")
    ]
    return f"measured {min(ratios):.2f} to {max(ratios):.2f} of the plan" if ratios else "planned"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """As Markdown."""
    lines = [
        "| preset | trains | workers | rows at once, accumulated | 1, 2, 3 cameras | of | evidence |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        needed = ", ".join(f"{gib:.1f}" for gib in row["needed_gib"].values())
        lines.append(
            f"| `{row['preset']}` | {row['mode']} | {row['workers']}, {row['strategy']} | {row['batch_size']} x "
            f"{row['grad_accum']} | {needed} GiB | {row['gpu_gib']:g} GiB | {row['evidence']} |"
        )
    return "\n".join(lines)


def on_one_gpu() -> list[dict[str, Any]]:
    """What runs need that people with one small GPU start, by rows at once, with three cameras."""
    found = []
    for way, (mode, peft, recomputed) in ONE_GPU_WAYS.items():
        needed = {}
        for rows in ONE_GPU_ROWS:
            config = parse_args(["--policy.type=pi05", *PLACES, f"--train.mode={mode}", f"--batch_size={rows}"])
            config = replace(config, peft=peft, train=replace(config.train, activation_checkpointing=recomputed))
            needed[str(rows)] = planned_for(config, CAMERAS[-1]).needed / GIB
        found.append({"way": way, "needed_gib": needed})
        tell(f"one GPU, {way}: {json.dumps(needed)}")
    return found


def table_of_one(found: Sequence[Mapping[str, Any]]) -> str:
    """As Markdown."""
    head = " | ".join(f"{rows} row{'s' * (rows > 1)} at once" for rows in ONE_GPU_ROWS)
    lines = [f"| one GPU, 3 cameras | {head} | fits |", "|---" * (2 + len(ONE_GPU_ROWS)) + "|"]
    for row in found:
        needed = list(row["needed_gib"].values())
        fitting = [card for card, gib in ONE_GPU_GIB.items() if needed[-1] <= gib]
        some = [card for card, gib in ONE_GPU_GIB.items() if needed[0] <= gib and card not in fitting]
        fits = ", ".join(fitting + [f"{card} with 1 row" for card in some])
        lines.append(f"| {row['way']} | {' | '.join(f'{gib:.1f} GiB' for gib in needed)} | {fits or 'neither'} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default=",".join(OF_PRESET), help="which, separated by commas")
    parser.add_argument("--one_gpu", action="store_true", help="besides, what people with one small GPU can do")
    parser.add_argument("--measured", type=Path, help="a file of benchmarks.gpu")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args(argv)
    measured = read_json(options.measured) if options.measured else {}
    rows: list[dict[str, Any]] = []
    for preset in options.presets.split(","):
        for mode in modes_of(preset):
            config = config_of(preset, mode)
            rows.append(
                {
                    "preset": preset,
                    "mode": mode,
                    "workers": config.scaling.num_workers,
                    "strategy": config.scaling.strategy,
                    "batch_size": config.batch_size,
                    "grad_accum": config.grad_accum,
                    "needed_gib": {str(n): planned(preset, mode, n).needed / GIB for n in CAMERAS},
                    "gpu_gib": OF_PRESET[preset].gib,
                    "evidence": evidence(measured, mode),
                }
            )
            tell(f"{preset}, {mode}: " + json.dumps(rows[-1]["needed_gib"]))
    tell_text(table(rows))
    one = on_one_gpu() if options.one_gpu else []
    if one:
        tell_text(table_of_one(one))
    if options.json:
        facts = {"command": shlex.join(sys.orig_argv[1:]), "environment": Environment.here().model_dump(mode="json")}
        write_json(options.json, {**facts, "presets": rows, "one_gpu": one})
    return 0


if __name__ == "__main__":
    sys.exit(main())
