"""Open-loop evaluation: inputs and compared actions; test_evaluation_json.py checks the values."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.factory import get_policy_class, make_policy_config, make_pre_post_processors
from lerobot.policies.pi0_fast.modeling_pi0_fast import PI0FastPolicy

from tests.datasets import make_dataset
from tests.policies.test_tiny_pi05 import make_base, make_features
from tests.tiny import perturb
from tests.tiny_backbones import KINDS
from tests.training.test_as_lerobot import resolved
from vla_finetuning.data.disk_cache import FrameCache
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.data.options import Features, Reading
from vla_finetuning.evaluation import after_training, open_loop
from vla_finetuning.evaluation.open_loop import (
    _placed,
    error_table,
    evaluate_run,
    held_out_frames,
    open_loop_errors,
    other_instructions,
    without_future,
)
from vla_finetuning.policies.registry import FAMILIES
from vla_finetuning.policies.saving import save_pretrained

CHUNK, ACTION, ROWS = 5, 3, 7
TASKS = ["Pick up the red cube.", "Open the drawer, slowly"]
MEAN = np.array([0.5, -0.25, 1.0])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = make_base(tmp_path_factory.mktemp("base") / "base")
    policy = get_policy_class("tiny_pi05").from_pretrained(folder)
    perturb(policy, 0.2)  # so that instructions and images matter
    return policy, *make_pre_post_processors(policy.config, pretrained_path=str(folder))


@pytest.fixture
def without_noise(loaded, monkeypatch):
    """Denoise from zero, so that rows and batches predict the same."""
    monkeypatch.setattr(loaded[0].model, "sample_noise", lambda shape, device: torch.zeros(shape, device=device))


def make_batches(sizes=(4, 3)):
    """Make rows as the dataset reader emits them."""
    rng = np.random.default_rng(5)
    features = make_features()
    row = {key: features[key]["shape"] for key in ("observation.images.top", "observation.images.wrist")}
    batches, first = [], 0
    for n in sizes:
        batch = {key: rng.integers(0, 256, (n, *shape), dtype=np.uint8) for key, shape in row.items()}
        batch["observation.state"] = rng.normal(size=(n, 4)).astype(np.float32)
        batch["action"] = rng.normal(size=(n, CHUNK, ACTION)).astype(np.float32)
        steps_left = (np.arange(first, first + n) * 3) % CHUNK + 1
        batch["action_is_pad"] = np.arange(CHUNK)[None] >= steps_left[:, None]
        batch["action"][batch["action_is_pad"]] = 1e6  # would be seen in any average
        batch["task"] = np.array([TASKS[i % 2] for i in range(first, first + n)], dtype=object)
        batch["index"] = np.arange(first, first + n)
        batches.append(batch)
        first += n
    return batches


def test_policy_with_future_observations_is_evaluated_on_the_present():
    state, pad = np.arange(24.0).reshape(2, 3, 4), np.zeros((2, 3), bool)
    batch = {"observation.state": state, "observation.state_is_pad": pad, "action": np.zeros((2, 5, ACTION))}
    present = without_future(batch, [-1, 0, 1])
    assert np.array_equal(present["observation.state"], state[:, 1])
    assert present["action"] is batch["action"] and present["observation.state_is_pad"] is pad
    for deltas in (None, [0], [-1, 0]):
        assert without_future(batch, deltas) is batch


def evaluate(loaded, batches=None, **options):
    options = {"mean_action": MEAN, "other_instruction": other_instructions(TASKS), **options}
    return open_loop_errors(*loaded, make_batches() if batches is None else batches, **options)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("open_loop") / "dataset"
    return make_dataset(root, episodes=(9, 4), cameras={"observation.images.top": (48, 64)}, tasks=["go to the bin"])


def lerobot_chunk(policy, pre, frames, now, steps, seed):
    """Return what LeRobot's `select_action` executes from a frame on, after the frames before it."""
    policy.reset()
    queue = policy._action_queue if hasattr(policy, "_action_queue") else policy._queues["action"]
    past = getattr(policy.config, "n_obs_steps", 1) - 1
    for frame in frames[max(0, now - past) : now + 1]:
        queue.clear()
        torch.manual_seed(seed)
        observation = {key: value for key, value in frame.items() if key.startswith("observation.")}
        chosen = policy.select_action(pre({**observation, "task": frame["task"]}))
    return torch.stack([chosen, *list(queue)[: steps - 1]], dim=1)


@pytest.mark.parametrize(
    ("kind", "steps"), [("diffusion", 4), ("vqbet", 3), ("multi_task_dit", 4), ("pi0_fast", 4), ("molmoact2", 4)]
)
def test_only_predicted_actions_of_a_chunk_are_compared(dataset, kind, steps, tmp_path, monkeypatch):
    """Horizons that begin in the past, and queues of observations."""
    monkeypatch.setattr(open_loop, "EVAL_BATCH", 1)
    whole = kind in ("pi0_fast", "molmoact2")  # LeRobot's cut or compress a chunk to n_action_steps
    options = {"policy.n_action_steps": 2} if whole else {}
    options |= {"policy.max_decoding_steps": 32} if kind == "pi0_fast" else {}
    # Replaces FAST, whose code is on the Hub and whose tokens need a trained policy.
    monkeypatch.setattr(PI0FastPolicy, "detokenize_actions", lambda self, tokens, action_horizon, action_dim: (
        tokens[:, : action_horizon * action_dim].float().unflatten(1, (action_horizon, action_dim))
    ))  # fmt: skip
    with KINDS[kind].here():
        run = resolved(dataset, kind, tmp_path, **{"dataset.eval_split": 0.5, **options})
        policy, (pre, post) = run.policy.start().eval(), run.policy.processors()
        save_pretrained(policy, pre, post, run.job.output_dir / "pretrained_model")
        errors = evaluate_run(run)["trained"]
        if whole:
            policy.config.n_action_steps = steps
        frames = list(LeRobotDataset("local/test", root=dataset, episodes=[1], video_backend="pyav"))
        recorded = torch.stack([frame["action"] for frame in frames])
        differences = []
        for number, example in enumerate(errors["examples"]):
            now = example["frame_index"]
            seed = int(np.random.SeedSequence((run.policy.seed, number)).generate_state(1, np.uint64)[0])
            expected = post(lerobot_chunk(policy, pre, frames, now, steps, seed))[0]
            np.testing.assert_allclose(example["predicted"], expected.numpy(), rtol=1e-4, atol=1e-5)
            known = recorded[now : now + steps]
            assert example["recorded"][: len(known)] == known.tolist()
            assert example["is_pad"] == [False] * len(known) + [True] * (steps - len(known))
            differences.append(expected[: len(known)] - known)
    assert len(errors["examples"]) == errors["frames"] == 4
    assert errors["policy"]["mse"] == pytest.approx(float((torch.cat(differences) ** 2).mean()), rel=1e-4)


@pytest.mark.parametrize("kind", ["pi05", "smolvla"])
def test_bfloat16_policy_plays_in_lerobot_tools_as_lerobot_loads_it(dataset, kind, tmp_path):
    with KINDS[kind].here():
        flags = {"train.mode": "expert", "train.precision": "bf16", "dataset.eval_split": 0.5}
        run = resolved(dataset, kind, tmp_path, **flags)
        save_pretrained(run.policy.start(), *run.policy.processors(), run.job.output_dir / "pretrained_model")
        errors = evaluate_run(run, frames=2)
    assert errors["tools"] == {"select_action": 0.0, "lerobot-rollout": 0.0, "PolicyServer": 0.0}
    assert errors["trained"]["frames"] == 2


def test_policy_without_action_prediction_is_not_measured(monkeypatch, capsys):
    config = SimpleNamespace(type="molmoact2", inference_action_mode=None)
    monkeypatch.setattr(after_training, "family_of", lambda config: FAMILIES[config.type])
    run = SimpleNamespace(policy=SimpleNamespace(config=config), rows=SimpleNamespace(any_held_out=True))
    assert after_training.evaluate_trained(run) == 0
    assert "not measured: 'molmoact2' predicts nothing: " in capsys.readouterr().out
    config.inference_action_mode = "discrete"
    assert FAMILIES["molmoact2"].cannot_predict(config) == ""


def test_seed_determines_errors_and_global_rng_is_unchanged(loaded):
    policy = loaded[0]
    policy.train()
    state = torch.random.get_rng_state()
    first, repeated, other = (evaluate(loaded, seed=seed) for seed in (1, 1, 2))
    assert first == repeated and first["policy"] != other["policy"]
    assert torch.equal(torch.random.get_rng_state(), state) and policy.training
    policy.eval()
    same = dict.fromkeys(TASKS, "") | {task: task for task in TASKS}
    assert evaluate(loaded, seed=1, other_instruction=same)["other_instruction"] == first["policy"]


def test_integer_observations_are_converted_as_in_training(loaded, without_noise):
    """LeRobot's normaliser would cast its statistics to integers."""
    policy, _, postprocessor = loaded
    stats = {"observation.state": {"q01": np.full(4, -1.7), "q99": np.full(4, 1.6)}}
    preprocessor, _ = make_pre_post_processors(policy.config, dataset_stats=stats)
    loaded, batches = (policy, preprocessor, postprocessor), make_batches()
    for batch in batches:
        batch["observation.state"] = batch["observation.state"].round()
    integers = [{**batch, "observation.state": batch["observation.state"].astype(np.int64)} for batch in batches]
    assert evaluate(loaded, integers) == evaluate(loaded, batches)


@pytest.mark.parametrize("mode", ["expert", "full"])
def test_predictions_use_training_precision(loaded, mode):
    policy, pre, post = copy.deepcopy(loaded[0]), *loaded[1:]
    spec = SimpleNamespace(train=SimpleNamespace(mode=mode))
    assert _placed(spec, policy, None, torch.device("cpu")) is policy
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    placed = _placed(spec, policy, torch.bfloat16, torch.device("cpu"))
    low = {name for name, parameter in placed.named_parameters() if parameter.dtype == torch.bfloat16}
    assert any(".language_model.layers.0.mlp." in name for name in low) is (mode == "expert")
    assert not any(".gemma_expert.model." in name for name in low)
    errors = evaluate((placed, pre, post), autocast=torch.bfloat16)
    assert errors["policy"]["mse"] == pytest.approx(evaluate(loaded)["policy"]["mse"], rel=0.05)


def test_incomparable_policy_is_refused(loaded):
    with pytest.raises(ValueError, match="no frames.*eval_split"):
        evaluate(loaded, [])
    short = [
        batch | {"action": batch["action"][:, :3], "action_is_pad": batch["action_is_pad"][:, :3]}
        for batch in make_batches()
    ]
    with pytest.raises(ValueError, match=r"\(4, 5, 3\).*\(4, 3, 3\)"):
        evaluate(loaded, short)


@pytest.mark.gpu
def test_gpu_errors_match_cpu(loaded, without_noise):
    expected = evaluate(loaded)
    policy, *processors = loaded
    actual = evaluate((copy.deepcopy(policy).cuda(), *processors))
    for name in ("policy", "other_instruction"):
        assert actual[name]["mse"] == pytest.approx(expected[name]["mse"], rel=1e-3)


@pytest.mark.parametrize(("use_gpu", "size"), [(True, 3), (False, 32)])
def test_gpu_batch_does_not_exceed_training_batch(use_gpu, size):
    sizes, job = [], SimpleNamespace(use_gpu=use_gpu, batch_size=3)
    source = SimpleNamespace(plan=SimpleNamespace(rows_per_epoch=9), read_rows=lambda rows, n: sizes.append(n) or [])
    policy = SimpleNamespace(config=make_policy_config("pi05"))
    run = SimpleNamespace(job=job, rows=SimpleNamespace(held_out=lambda **_: source), policy=policy, robots=[None])
    with pytest.raises(ValueError, match="none of the held-out episodes can be read"):
        open_loop._errors_of(run, [0], None, 4)
    assert sizes == [size]


def test_error_table_is_relative_to_mean_action():
    def errors(policy):
        mses = {"mean_action": 8.0, "policy": policy, "other_instruction": None}
        return {"frames": 12, **{name: mse and {"mse": mse, "mae": [1.0]} for name, mse in mses.items()}}

    *rows, last = error_table(errors(2.0), errors(16.0)).splitlines()[2:]
    assert [row.split()[-1] for row in rows] == ["1.000", "2.000", "0.250"] and "one instruction" in last


def test_each_instruction_is_replaced_by_another():
    assert other_instructions(["a", "b", "a", "c"]) == {"a": "b", "b": "c", "c": "a"}
    assert other_instructions(["a", "a"]) == {}


def test_held_out_frames_match_lerobot(tmp_path):
    metas = [load_metadata(make_dataset(tmp_path / name, episodes=(4, 6, 5), seed=i)) for i, name in enumerate("ab")]
    rows = SimpleNamespace(
        metas=metas,
        eval_episodes=(np.array([], int), np.array([1, 2])),
        features=Features(camera_keys=metas[1].camera_keys, columns=("observation.state", "action"), image_size=(8, 8)),
        reading=Reading(frame_cache=FrameCache(str(tmp_path / "cache"), 1.0)),
    )
    reference = LeRobotDataset("local/b", root=tmp_path / "b", episodes=[1], video_backend="pyav")
    frames = list(held_out_frames(rows))
    assert len(list((tmp_path / "cache").glob("*/*/*/*"))) == len(metas[1].camera_keys)  # as the run itself
    assert len(frames) == len(reference) == 6 and len(list(held_out_frames(rows, limit=2))) == 2
    for frame, expected in zip(frames, reference, strict=True):
        assert frame["task"] == expected["task"]
        keys = {key for key in expected if key.startswith("observation.") or key == "action"}
        assert set(frame) == keys | {"task"}
        assert all(frame[key].dtype == expected[key].dtype and torch.equal(frame[key], expected[key]) for key in keys)
    rows.eval_episodes = ((), ())
    with pytest.raises(ValueError, match="--dataset.eval_split"):
        next(held_out_frames(rows))
