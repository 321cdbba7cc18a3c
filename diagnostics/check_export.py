"""Check on recorded frames which of LeRobot's tools act as evaluate.py with an exported policy.

    python -m diagnostics.check_export FOLDER_OR_HUB_ID DATASET [--episode 0]

DATASET is a folder, a bucket or USER/NAME on the Hub, with the inputs of the policy's robot. The first frames of an
episode are given to the loop over `select_action` of lerobot-eval, the engine of lerobot-rollout, and PolicyServer. A
run with held-out episodes ends with the same check. Exit status: 0 all tools act as evaluate.py, bit for bit; 1 one
differs or fails; 2 the check could not run.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lerobot.utils.constants import ACTION

from vla_finetuning.data.dataset_files import fetch_dataset
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.data.options import Features, Reading
from vla_finetuning.evaluation.open_loop import TASK, episode_frames
from vla_finetuning.evaluation.robot_tools import MOST_STEPS, compare_tools, describe_tools
from vla_finetuning.files import read_json
from vla_finetuning.options.policy import ROBOT_NAME
from vla_finetuning.policies.loading import fetch_pretrained, load_policy, load_policy_config
from vla_finetuning.policies.pipelines import saved_rename_map
from vla_finetuning.terminal import escape_warnings, print_safe, print_safe_error


def check_export(path: str, dataset: str, episode: int = 0, *, trusted: bool = False) -> dict[str, Any]:
    """Return the result of `compare_tools` for a policy on the first frames of an episode."""
    folder, _ = fetch_pretrained(path)
    config, facts = load_policy_config(folder), read_json(folder / ROBOT_NAME)
    if Path(dataset).is_dir() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", dataset):
        meta = load_metadata(dataset)
    else:
        meta = load_metadata(fetch_dataset(dataset, episodes=[episode])[0])
    names = {policy: name for name, policy in saved_rename_map(folder).items()}
    inputs = {names.get(key, key): key for key in config.input_features}
    cameras = [name for name in inputs if name in meta.camera_keys]
    vectors = [name for name, key in inputs.items() if key not in config.image_features]
    if missing := [name for name in (*facts.get("cameras", ()), *vectors) if name not in meta.features]:
        raise ValueError(
            f"dataset {dataset} has no {', '.join(missing)}, which the policy {path} was trained with; it has "
            f"{', '.join(meta.features)}: give a dataset of the policy's robot"
        )
    if not 0 <= episode < meta.num_episodes:
        raise ValueError(f"--episode={episode}: dataset {dataset} has episodes 0 to {meta.num_episodes - 1}")
    frames = episode_frames(meta, episode, Features(cameras, [*vectors, ACTION]), Reading(), MOST_STEPS)
    begin, end = (facts.get(f"instructions_{place}_with", "") for place in ("begin", "end"))
    prompted = [{**frame, TASK: f"{begin}{frame[TASK]}{end}"} for frame in frames]
    policy = load_policy(folder, config, trusted=trusted).to("cuda" if torch.cuda.is_available() else "cpu")
    return compare_tools(policy, folder, prompted, trusted=trusted)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", metavar="FOLDER_OR_HUB_ID")
    parser.add_argument("dataset", metavar="DATASET")
    parser.add_argument("--episode", type=int, default=0)
    parser.add_argument("--policy.trust_remote_code", choices=("true", "false"), default="false", dest="trusted")
    options = parser.parse_args(argv)
    escape_warnings()
    try:
        differences = check_export(options.policy, options.dataset, options.episode, trusted=options.trusted == "true")
        if not differences:
            raise ValueError(f"policy {options.policy}: neither evaluate.py nor this plays one of its type")
    except (ValueError, OSError) as error:
        print_safe_error(error)
        return 2
    for line in describe_tools(differences):
        print_safe(f"On the robot {line}")
    return int(any(difference != 0.0 for difference in differences.values()))


if __name__ == "__main__":
    sys.exit(main())
