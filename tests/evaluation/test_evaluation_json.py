"""Every number of evaluation.json against a plain computation from LeRobot's dataset and policy; extra keys fail."""

import json

import numpy as np
import pytest
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.factory import make_pre_post_processors

from tests.datasets import make_dataset
from tests.in_process import TINY
from tests.tiny import make_base, perturb
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.evaluation import after_training, demo_success, open_loop
from vla_finetuning.evaluation.demo_success import LABELS
from vla_finetuning.evaluation.intervals import score
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.plan.datasets import find_datasets
from vla_finetuning.plan.demo import make_demo_dataset
from vla_finetuning.plan.matching import policy_data
from vla_finetuning.plan.resolve import resolve
from vla_finetuning.policies.saving import save_pretrained
from vla_finetuning.policies.tiny_pi05 import TinyPI05Policy, make_tiny_base
from vla_finetuning.rollouts import servers
from vla_finetuning.run import cluster
from vla_finetuning.training.export import in_own_names

FRAMES, BATCH, SEED, CHUNK = 11, 5, 5, 6
FILMS = [{"title": "a picture"}]
# Computed in tests/evaluation/test_robot_tools.py.
EQUAL_TOOLS = {"select_action": 0.0, "lerobot-rollout": 0.0, "PolicyServer": 0.0}


@pytest.fixture
def run(tmp_path):
    """Resolve a demo run and export its policy."""
    folder = tmp_path
    meta = load_metadata(make_demo_dataset(folder / "dataset", pairs=3))
    options = {
        "dataset.root": meta.root,
        "dataset.eval_split": 0.6,
        "dataset.statistics": "stored",
        "policy.path": make_base(folder / "base", meta, chunk_size=CHUNK, **TINY),
        "output_dir": folder / "run",
        "train.mode": "full",
        "seed": SEED,
        "scaling.use_gpu": "false",
    }
    run = resolve(parse_args([f"--{name}={value}" for name, value in options.items()]), gpus_found=0)
    save_pretrained(run.policy.start(), *run.policy.processors(), run.job.output_dir / "pretrained_model")
    return run


def test_closed_loop_numbers_match_plain_computation(run, monkeypatch, capsys):
    """Episode outcomes are random."""
    rng, played = np.random.default_rng(0), []

    def play(episodes, *_, on_end, **__):
        for episode in episodes:
            success, reached, error, stayed = rng.random(4) < (0.4, 0.6, 0.1, 0.5)
            info = {"reached": "red" if reached or success else None}
            line = {"instruction": "go", "success_once": bool(success), "info": info, "error": None}
            line |= {"success_at_end": bool(success and stayed), "initial_state": f"{episode.seed}"}
            if error:
                line = dict.fromkeys(line) | {"error": "died"}
            played.append(vars(episode) | line)
            on_end(played[-1], None if error else np.zeros((1, 3)))

    error = dict.fromkeys(("mean_action", "policy", "other_instruction"), {"mse": 1.0, "mae": [1.0] * 3})
    errors = {"trained": {"frames": 1, **error}, "tools": EQUAL_TOOLS}
    monkeypatch.setattr(cluster, "run_remote", lambda *_, **__: errors)
    monkeypatch.setattr(after_training, "is_demo", lambda *_: True)
    monkeypatch.setattr(servers, "play", play)
    monkeypatch.setattr(demo_success, "make_films", lambda *_: FILMS)
    result = evaluated(run)
    assert result | {"closed_loop": None} == {**errors, "closed_loop": None, "films": FILMS}
    check(result["closed_loop"], closed_loop_by_hand(played))
    assert sum(line["condition"] == "trained" for line in played) == 60 and len(played) == 240
    scores, printed = result["closed_loop"], capsys.readouterr().out
    assert f"; {scores['other_instruction']['went_where_told']} went to the bin that they were given\n" in printed
    assert f"; {scores['blindfolded']['went_to_a_bin']} went to a bin\n" in printed
    assert printed.count(" asked for: ") == sum("errors" in score for score in scores.values()) > 0


def evaluated(run):
    assert after_training.evaluate_trained(run) == 0
    return json.loads((run.job.output_dir / "evaluation.json").read_text())


def lerobot_rows(meta, episodes, step=1):
    """Return LeRobot's rows of episodes, with a chunk of every `step`-th action."""
    deltas = {"action": [number * step / meta.fps for number in range(CHUNK)]}
    assert 1 < len(episodes) < meta.num_episodes
    return LeRobotDataset(
        "local/x", root=meta.root, episodes=episodes.tolist(), delta_timestamps=deltas, video_backend="pyav"
    )


def spread(rows):
    return [rows[round(place)] for place in np.linspace(0, len(rows) - 1, min(FRAMES, len(rows)))]


def predicted(weights, exported, rows, tasks):
    """Predict chunks row by row with LeRobot's calls and the noise of batches, float64 (N, T, A)."""
    policy = TinyPI05Policy.from_pretrained(weights, config=PreTrainedConfig.from_pretrained(exported)).eval()
    pre, post = make_pre_post_processors(policy.config, pretrained_path=str(exported))
    chunks = []
    for number, first in enumerate(range(0, len(rows), BATCH)):
        batch = rows[first : first + BATCH]
        torch.manual_seed(int(np.random.SeedSequence((SEED, number)).generate_state(1, np.uint64)[0]))
        noise = torch.normal(0.0, 1.0, (len(batch), CHUNK, policy.config.max_action_dim))
        for i, row in enumerate(batch):
            observation = {key: value[None] for key, value in row.items() if key.startswith("observation.")}
            inputs = pre({**observation, "task": [tasks[first + i]]})
            with torch.no_grad():
                chunk = policy.predict_action_chunk(inputs, noise=noise[i : i + 1])
            chunks.append(post(chunk)[0].double().numpy())
    return np.stack(chunks)


def errors(chunks, rows, only=None):
    """Return errors of the unpadded actions, of all tasks or only one."""
    chosen = [i for i, row in enumerate(rows) if only in (None, row["task"])]
    off = [chunks[i] - rows[i]["action"].double().numpy() for i in chosen]
    counted = np.concatenate([o[~rows[i]["action_is_pad"].numpy()] for o, i in zip(off, chosen, strict=True)])
    return {"mse": (counted**2).mean(), "mae": list(np.abs(counted).mean(0))}


def open_loop_by_hand(weights, exported, rows, mean_action, others=None):
    """Compute errors; `others` maps each instruction to its replacement."""
    tasks = [row["task"] for row in rows]
    chunks = predicted(weights, exported, rows, tasks)
    constant = np.broadcast_to(mean_action, chunks.shape)
    other = others and errors(predicted(weights, exported, rows, [others[task] for task in tasks]), rows)
    return {
        "frames": len(rows),
        "mean_action": errors(constant, rows),
        "policy": errors(chunks, rows),
        "other_instruction": other,
        "by_task": {
            task: {
                "frames": tasks.count(task),
                "mean_action": errors(constant, rows, task),
                "policy": errors(chunks, rows, task),
            }
            for task in set(tasks)
        },
        "examples": [
            {
                "task": row["task"],
                "dataset_index": row["dataset_index"],
                "episode_index": int(row["episode_index"]),
                "frame_index": int(row["frame_index"]),
                "recorded": row["action"].tolist(),
                "predicted": chunk.tolist(),
                "is_pad": row["action_is_pad"].tolist(),
            }
            for row, chunk in list(zip(rows, chunks, strict=True))[::BATCH]
        ],
    }


def closed_loop_by_hand(played):
    """Return scores (checked in tests/evaluation/test_intervals.py) and counts of bins reached."""
    scores = {}
    for name, label in LABELS.items():
        lines = [line for line in played if line["condition"] == name]
        scores[name] = {"label": label, **score(lines)}
        reached = [line for line in lines if line["error"] is None and line["info"]["reached"]]
        if name == "other_instruction":
            scores[name]["went_where_told"] = sum(not line["success_once"] for line in reached)
        if name == "blindfolded":
            scores[name]["went_to_a_bin"] = len(reached)
    return scores


def flat(value, path=""):
    """Return numbers and texts by their path."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: leaf for key, item in items for name, leaf in flat(item, f"{path}/{key}").items()}
    return {path: value}


def check(result, expected):
    actual, reference = flat(result), flat(expected)
    assert actual.keys() == reference.keys(), "a key of evaluation.json without a plain computation, or one too many"
    for path, value in reference.items():
        if isinstance(value, float):
            value = pytest.approx(value, rel=1e-3 if path.endswith("mse") else 1e-4, abs=1e-4)
        assert actual[path] == value, path


def check_distinct(*mses):
    """Check that no two values are confusable."""
    assert len({round(mse, 2) for mse in mses}) == len(mses)


# ---- of several robots -----------------------------------------------------------------------------------------------

FRONT, TOP, WRIST, BASE = (f"observation.images.{name}" for name in ("front", "top", "wrist", "base"))
RED, BLUE, GREEN = (f"go to the {colour} bin" for colour in ("red", "blue", "green"))
ACTION_ORDER, STEP = [2, 0, 1], 2  # of the gantry's dimensions; of the arm, the frames between two actions
DATASETS = ("arm", "gantry", "gantry2")  # as the run numbers them
FPS = {"arm": 20, "gantry": 10, "gantry2": 10}
WEIGHTS = {"gantry": 4, "gantry2": 2}  # of an epoch of 49 rows: whole rows, with the 1 of the arm
TASKS = {"arm": [RED, BLUE], "gantry": [RED, BLUE], "gantry2": [BLUE, GREEN]}
ROBOTS = {"arm": ["arm"], "gantry": ["gantry", "gantry2"]}
# Each instruction's replacement: the robot's next one, sorted within each dataset.
OTHERS = {"arm": {BLUE: RED, RED: BLUE}, "gantry": {BLUE: RED, RED: GREEN, GREEN: BLUE}}


@pytest.fixture(scope="module")
def robots_run(tmp_path_factory):
    """Resolve a run of two robots and export its perturbed policies."""
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
    make_tiny_base(folder / "base", **data, stats=None, chunk_size=CHUNK, **TINY)
    run = resolve(config, gpus_found=0, datasets=datasets)
    trained = perturb(run.policy.start(), 0.2)
    for robot in run.robots:
        pipelines, config, _ = in_own_names(run.policy.select_robot(robot))
        save_pretrained(trained, *pipelines, exported(run, robot.name), config)
    return run


def exported(run, robot):
    return run.job.output_dir / "pretrained_model" / robot


def held_out_rows(run, robot):
    """Return a robot's predicted rows, spread over its held-out episodes, and its mean action."""
    frames, means, shares = [], [], []
    for name in ROBOTS[robot]:
        number = DATASETS.index(name)
        meta = run.rows.metas[number]
        assert meta.root.endswith(f"/{name}") and meta.fps == FPS[name]
        rows = lerobot_rows(meta, run.rows.eval_episodes[number], STEP if robot == "arm" else 1)
        order = ACTION_ORDER if robot == "gantry" else slice(None)
        for row in map(rows.__getitem__, range(len(rows))):
            labels = {"task": f"{robot}: {row['task']}", "dataset_index": number}
            frames.append({**row, **labels, "action": row["action"][:, order]})
        means.append(rows.meta.stats["action"]["mean"][order])
        shares.append(WEIGHTS.get(name, 1))
    return spread(frames), np.average(means, axis=0, weights=shares)


def test_open_loop_numbers_of_each_robot_match_plain_computation(robots_run, monkeypatch):
    monkeypatch.setattr(cluster, "run_remote", lambda function, run, scaling: function(run, frames=FRAMES))
    monkeypatch.setattr(open_loop, "EVAL_BATCH", BATCH)
    run, result, expected = robots_run, evaluated(robots_run), {}
    for robot in ROBOTS:
        (rows, mean), weights = held_out_rows(run, robot), exported(run, robot)
        others = {f"{robot}: {task}": f"{robot}: {other}" for task, other in OTHERS[robot].items()}
        expected[robot] = {
            "trained": open_loop_by_hand(weights, weights, rows, mean, others),
            "untrained": open_loop_by_hand(run.policy.folder, weights, rows, mean),
            "tools": EQUAL_TOOLS,
        }
    check(result, {"robots": expected})
    names = ("mean_action", "policy", "other_instruction")
    mses = [numbers["trained"][name]["mse"] for numbers in expected.values() for name in names]
    check_distinct(*mses, *(numbers["untrained"]["policy"]["mse"] for numbers in expected.values()))
    examples = [example for numbers in result["robots"].values() for example in numbers["trained"]["examples"]]
    assert {True, False} == {pad for example in examples for pad in example["is_pad"]}
    assert {0, 1, 2} == {example["dataset_index"] for example in examples}
