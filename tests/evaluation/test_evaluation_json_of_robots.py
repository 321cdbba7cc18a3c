"""Compare every number in the evaluation.json of several robots with a plain computation, as is done for one.

The robots differ in rate, widths, cameras and instructions; one has two datasets, and its actions in an order of their
own.
"""

import json

import numpy as np
import pytest
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from tests.datasets import make_dataset
from tests.evaluation.test_evaluation_json import (
    ALIKE,
    AT_ONCE,
    CHUNK,
    FRAMES,
    SEED,
    check,
    check_told_apart,
    open_loop_by_hand,
)
from tests.in_process import TINY
from tests.tiny import perturb
from vla_finetuning.evaluation import after_training, open_loop
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.plan.datasets import find_datasets
from vla_finetuning.plan.matching import policy_data
from vla_finetuning.plan.resolve import resolve
from vla_finetuning.policies.saving import save_pretrained
from vla_finetuning.policies.tiny_pi05 import make_tiny_base
from vla_finetuning.run import cluster
from vla_finetuning.training.export import in_own_names

FRONT, TOP, WRIST, BASE = (f"observation.images.{name}" for name in ("front", "top", "wrist", "base"))
RED, BLUE, GREEN = (f"go to the {colour} bin" for colour in ("red", "blue", "green"))
ACTION_ORDER, STEP = [2, 0, 1], 2  # of the gantry's dimensions; of the arm, the frames between two actions
DATASETS = ("arm", "gantry", "gantry2")  # as the run numbers them
FPS = {"arm": 20, "gantry": 10, "gantry2": 10}
WEIGHTS = {"gantry": 4, "gantry2": 2}  # of an epoch of 49 rows: whole rows, with the 1 of the arm
TASKS = {"arm": [RED, BLUE], "gantry": [RED, BLUE], "gantry2": [BLUE, GREEN]}
ROBOTS = {"arm": ["arm"], "gantry": ["gantry", "gantry2"]}
# An instruction and the one that is said instead: the next one of the robot's, dataset by dataset, sorted in each.
OTHERS = {"arm": {BLUE: RED, RED: BLUE}, "gantry": {BLUE: RED, RED: GREEN, GREEN: BLUE}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Resolve a run and export its policies, with weights of which all matter."""
    folder = tmp_path_factory.mktemp("robots")
    two, front = {TOP: (48, 64), WRIST: (64, 48)}, {FRONT: (48, 64)}
    make_dataset(folder / "arm", episodes=(9, 12, 14, 11), cameras=front, fps=20, state_dim=6, action_dim=5, seed=3)
    for seed, name in enumerate(ROBOTS["gantry"]):
        make_dataset(folder / name, episodes=(9, 5, 7, 12), cameras=two, tasks=TASKS[name], seed=seed)
    gantry = {"robot": "gantry", "rename_map": {TOP: BASE}, "action": [f"motor_{i}" for i in ACTION_ORDER]}
    members = [{"root": name, "weight": weight, **gantry} for name, weight in WEIGHTS.items()]
    members.append({"root": "arm", "robot": "arm", "fps": FPS["arm"] // STEP, "rename_map": {FRONT: BASE}})
    (folder / "mix.yaml").write_text(json.dumps({"members": members}))
    options = {
        "dataset.mixture": f"@{folder / 'mix.yaml'}",
        "dataset.eval_split": 0.3,
        "dataset.statistics": "stored",
        "dataset.missing_cameras": "mask",
        "dataset.image_size": "stored",
        "dataset.robot_in_prompt": "true",
        "policy.path": folder / "base",
        "output_dir": folder / "run",
        "train.mode": "full",
        "seed": SEED,
        "scaling.use_gpu": "false",
    }
    config, datasets = find_datasets(parse_args([f"--{name}={value}" for name, value in options.items()]))
    data = policy_data(config, datasets, [meta.episode_index for meta in datasets.metas])
    make_tiny_base(folder / "base", **vars(data), stats=None, chunk_size=CHUNK, **TINY)
    run = resolve(config, gpus_found=0, datasets=datasets)
    trained = perturb(run.policy.start(), 0.2)
    for robot in run.robots:
        own = run.policy.select_robot(robot.by_own_names())
        pipelines, config, _ = in_own_names(own)
        save_pretrained(trained, *pipelines, exported(run, robot.name), config)
    return run


def exported(run, robot):
    return run.job.output_dir / "pretrained_model" / robot


def held_out(run, robot):
    """Return the rows of a robot that are predicted, spread over its datasets' held-out episodes; the mean action."""
    frames, means, shares = [], [], []
    for name in ROBOTS[robot]:
        number = DATASETS.index(name)
        meta, episodes = run.rows.metas[number], run.rows.eval_episodes[number].tolist()
        assert meta.root.endswith(f"/{name}") and 1 < len(episodes) < meta.num_episodes
        deltas = {"action": [step * (STEP if robot == "arm" else 1) / FPS[name] for step in range(CHUNK)]}
        rows = LeRobotDataset(
            "local/x", root=meta.root, episodes=episodes, delta_timestamps=deltas, video_backend="pyav"
        )
        order = ACTION_ORDER if robot == "gantry" else slice(None)
        for row in rows:
            said = {"task": f"{robot}: {row['task']}", "dataset_index": number}
            frames.append({**row, **said, "action": row["action"][:, order]})
        means.append(rows.meta.stats["action"]["mean"][order])
        shares.append(WEIGHTS.get(name, 1))
    chosen = np.linspace(0, len(frames) - 1, min(FRAMES, len(frames)))
    return [frames[round(place)] for place in chosen], np.average(means, axis=0, weights=shares)


def test_every_number_of_each_robot_is_a_plain_computation(run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "run_remote", lambda function, run, scaling, **o: function(run, frames=FRAMES, **o))
        patch.setattr(open_loop, "EVAL_BATCH", AT_ONCE)
        assert after_training.evaluate_trained(run) == 0
    written, expected = json.loads((run.job.output_dir / "evaluation.json").read_text()), {}
    for robot in ROBOTS:
        (rows, mean), own = held_out(run, robot), exported(run, robot)
        others = {f"{robot}: {task}": f"{robot}: {other}" for task, other in OTHERS[robot].items()}
        expected[robot] = {
            "trained": open_loop_by_hand(own, own, rows, mean, others),
            "untrained": open_loop_by_hand(run.policy.folder, own, rows, mean),
            "tools": ALIKE,
        }
    check(written, {"robots": expected})
    names = ("mean_action", "policy", "other_instruction")
    mses = [of["trained"][name]["mse"] for of in expected.values() for name in names]
    check_told_apart(*mses, *(of["untrained"]["policy"]["mse"] for of in expected.values()))
    examples = [example for of in written["robots"].values() for example in of["trained"]["examples"]]
    assert {True, False} == {pad for example in examples for pad in example["is_pad"]}
    assert {0, 1, 2} == {example["dataset_index"] for example in examples}
