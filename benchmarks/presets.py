"""What fits where, and how fast: GPU memory and speed of PI0.5 at its real size, predicted for each preset.

    python -m benchmarks.presets --json benchmarks/results/presets.json

Memory is GiB per worker, with three cameras of 480x640 and prompts of 200 tokens, by the plan that refuses a run which
does not fit; for each preset, and for one GPU. Rows/s of each GPU and MFU are for as many GPUs as the preset has, with
prompts of 96 tokens, by the model of `profile_step --predict`. Shapes are traced on tensors without storage, half a
minute for each; nothing is measured.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from lerobot.configs import PreTrainedConfig
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.utils.constants import ACTION

from diagnostics.report import Environment
from diagnostics.step_prediction import policy_to_predict, predicted
from vla_finetuning.cards import CARDS_GIB, OF_PRESET, Card
from vla_finetuning.config import PRESETS, Config
from vla_finetuning.files import write_json
from vla_finetuning.flags import parse_args
from vla_finetuning.policies.registry import family_of
from vla_finetuning.terminal import tell
from vla_finetuning.training.capacity import needed_by
from vla_finetuning.training.memory import GIB

CAMERAS, FRAME, PROMPT = 3, (480, 640), 200
PLACES = ("--policy.path=p", "--dataset.root=d", "--output_dir=o", "--scaling.use_gpu=true")
ATTENTION = r".*(language_model|gemma_expert).*\.(q_proj|k_proj|v_proj|o_proj)"
# Of one GPU, each with 1 and with 8 rows.
ONE_GPU = {
    "--train.mode heads": ["--train.mode=heads"],
    "--train.mode expert": ["--train.mode=expert"],
    "--peft.r 16": ["--peft.r=16"],
    "--peft.r 16, all attention": ["--peft.r=16", f"--peft.target_modules={ATTENTION}"],
    "the same, --train.activation_checkpointing": [
        *("--peft.r=16", f"--peft.target_modules={ATTENTION}", "--train.activation_checkpointing=true")
    ],
}


def planned_gib(config: Config) -> float:
    """What a worker needs of a run of PI0.5 with these options, from pretrained weights."""
    make: Any = PreTrainedConfig.get_choice_class("pi05")
    policy = make(device="cpu", pretrained_path=Path("pi05_base"))
    policy.output_features = {ACTION: PolicyFeature(FeatureType.ACTION, (policy.max_action_dim,))}
    policy = family_of(policy).with_cameras(policy, CAMERAS, PROMPT)
    return round(needed_by(config, policy, cameras=CAMERAS, frames=[FRAME] * CAMERAS).needed / GIB, 2)


def predicted_speed(config: Config, card: Card) -> dict[str, dict[str, float]]:
    """rows/s of a GPU and MFU, eager and compiled, on as many as the run has workers."""
    _, times = predicted(config, policy_to_predict("pi05"), card, config.scaling.num_workers)
    return {
        "compiled" if time.compiled else "eager": {
            "rows_per_s": round(time.rows_per_s, 1),
            "mfu": round(time.mfu, 3),
        }
        for time in times
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args()
    presets, one_gpu, known = {}, {}, dict[str, float]()
    for preset, card in OF_PRESET.items():
        config = parse_args([f"--preset={preset}", *PLACES])
        alike = str({name: value for name, value in PRESETS[preset].items() if "accelerator" not in name})
        known[alike] = known.get(alike) or planned_gib(config)
        speed = predicted_speed(config, card)
        presets[preset] = {
            "flags": PRESETS[preset],
            "needed_gib": known[alike],
            "gpu_gib": CARDS_GIB[card.name or ""],
            "predicted": speed,
        }
        said = ", ".join(f"{how} {of['rows_per_s']:.1f} rows/s, MFU {of['mfu']:.1%}" for how, of in speed.items())
        tell(f"{preset:10} {known[alike]:.1f} of {presets[preset]['gpu_gib']} GiB; {said}")
    for way, flags in ONE_GPU.items():
        one_gpu[way] = {rows: planned_gib(parse_args([*flags, f"--batch_size={rows}", *PLACES])) for rows in (1, 8)}
        tell(f"one GPU    {one_gpu[way][1]:.1f} and {one_gpu[way][8]:.1f} GiB with 1 and 8 rows: {way}")
    if options.json is not None:
        environment = Environment.here().model_dump(mode="json")
        known_of = {"command": shlex.join(sys.orig_argv[1:]), "environment": environment}
        write_json(options.json, {**known_of, "presets": presets, "one_gpu": one_gpu})


if __name__ == "__main__":
    main()
