"""Evaluation of checkpoints during training: capacity, failures, resume."""

import json
import threading
import time
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from ray.data import ExecutionOptions
from safetensors.torch import load_file

import tests.arm  # noqa: F401 (an environment)
import vla
from tests import in_process
from tests.in_process import TINY
from tests.tiny import make_base
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.envs import configs
from vla_finetuning.evaluation import during
from vla_finetuning.evaluation.during import Evaluator, capacity_beside
from vla_finetuning.evaluation.episodes import read_evaluation
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.plan.demo import make_demo_dataset
from vla_finetuning.plan.resolve import resolve
from vla_finetuning.rollouts.player import packed, unpacked
from vla_finetuning.rollouts.scheduler import NoCapacityError
from vla_finetuning.run.attempts import start_attempt
from vla_finetuning.run.folder import evaluations
from vla_finetuning.training.export import policy_at


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Make a small demo dataset and a tiny base policy for it."""
    folder = tmp_path_factory.mktemp("during")
    root = make_demo_dataset(folder / "dataset", pairs=2)
    meta = load_metadata(root)
    base = make_base(folder / "base", meta, **TINY)
    return folder, root, base


def flags(setting, **changes):
    playing = {"env.type": "two_bins", "env.episode_length": 6, "env_eval_freq": 2, "eval.n_episodes": 3}
    keeping = {"steps": 4, "log_freq": 1, "save_freq": 2, "keep_checkpoints": 1, "keep_best": "1,success"}
    small = {"scaling.cpus_per_worker": 0.5, "grad_accum": None, "scaling.use_gpu": None}
    return in_process.flags(setting, **{**playing, **keeping, **small, **changes})


def evaluated(run):
    """Return the steps whose checkpoints were evaluated."""
    return [line["step"] for line in evaluations(run.job.output_dir)]


@pytest.mark.ray
def test_training_run_evaluates_its_checkpoints(ray_cluster, setting, monkeypatch, capsys):
    """Run the program with training in this process instead of a worker group."""

    def fit(job, make_trainer):
        run = during.ray.get(make_trainer())
        assert vla.train(run, worker := in_process.alone(run)).finished
        worker.thread.join()
        vla.export_run(run)
        return True

    monkeypatch.setattr(vla, "worker_group", lambda job, loop, config, **_: config["run"])
    monkeypatch.setattr(vla, "fit", fit)
    argv = flags(setting, steps=2, **{"eval.env_actors": 1})
    assert vla.main(argv) == 0
    folder = setting[0] / "run"
    printed = capsys.readouterr().out
    plan = "two_bins --episode_length=6: checkpoints play 3 episodes of each task, every 2 steps and at the end"
    assert plan in printed and "keeping the last 1 and the 1 best by success, in" in printed
    assert "Success      step 2: 0 of 3" in printed
    assert [(line["step"], line["episodes"], line["errors"]) for line in evaluations(folder)] == [(2, 3, 0)]
    about, lines = read_evaluation(folder / "evaluations" / "step_00000002")
    assert about["policy"]["step"] == 2 and [line["seed"] for line in lines] == [1000, 1001, 1002]
    assert all(line["steps"] == 6 for line in lines)
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["step"], last["success_step"], last["success"]) == (2, 2, 0.0) and last["success_high"] > 0.5
    page = (folder / "report.html").read_text()
    assert "Success in the loop over steps" in page and "step 2" in page

    # The last checkpoint's weights are the exported ones.
    run = resolve(parse_args(argv), gpus_found=0)
    exported = load_file(folder / "pretrained_model" / "model.safetensors")
    weights = policy_at(run.policy, run.job.checkpoints_dir / "step_00000002").state_dict()
    assert all(torch.equal(weights[name], exported[name]) for name in exported)
    started = run.policy.start().state_dict()
    assert any(not torch.equal(weights[name], started[name]) for name in exported)


def test_checkpoint_acts_in_precision_of_its_export(resolved, monkeypatch):
    (robot,) = resolved.robots
    robot = replace(robot, config=replace(robot.config, use_amp=True))
    train = replace(resolved.policy.train, precision="fp32")
    run = replace(resolved, policy=replace(resolved.policy, robots=(robot,), train=train))
    monkeypatch.setattr(during.ray, "remote", lambda **_: Mock())
    assert not Evaluator(run, policy_at)._source(run.job.checkpoints_dir).config.use_amp


class StandInPlay:
    """Replaces `play`: records its calls, and ends episodes unless stopped by `may`."""

    def __init__(self):
        self.steps, self.threads, self.may, self.error = [], [], threading.Event(), None
        self.succeeds, self.fails_with = lambda episode: True, None
        self.may.set()

    def __call__(self, episodes, conditions, sources, makers, options, *, on_end, stopped, **_):
        self.steps.append(int(sources["policy"].folder.name.removeprefix("step_")))
        self.threads.append(threading.current_thread())
        while not self.may.wait(0.02):
            if stopped():
                return
        if self.error is not None:
            raise self.error
        line = dict.fromkeys(("instruction", "info"), "") | {"error": self.fails_with, "success_at_end": False}
        for episode in episodes:
            state = str(episode.seed)
            on_end({**line, **vars(episode), "success_once": self.succeeds(episode), "initial_state": state}, None)


@pytest.fixture
def playback(monkeypatch):
    stand_in = StandInPlay()
    monkeypatch.setattr(during, "play", stand_in)
    monkeypatch.setattr(during, "POLL_S", 0.02)
    monkeypatch.setattr(during.ray, "cluster_resources", lambda: {"CPU": 4.0})
    monkeypatch.setattr(Evaluator, "_source", lambda self, path: during.PolicySource(path, None, env=None))
    monkeypatch.setattr(during, "load_progress", lambda path: None)
    return stand_in


@pytest.fixture(scope="module")
def resolved(setting):
    return resolve(parse_args(flags(setting, output_dir=setting[0] / "resolved", steps=8)), gpus_found=0)


@pytest.fixture
def run(resolved, tmp_path):
    """Return a run of 8 steps without checkpoints, in a folder of its own."""
    config = replace(resolved.config, output_dir=str(tmp_path / "run"))
    run = replace(resolved, config=config, job=replace(resolved.job, output_dir=tmp_path / "run"))
    run.job.checkpoints_dir.mkdir(parents=True)
    return run


def save(run, *steps):
    for step in steps:
        folder = run.job.checkpoints_dir / f"step_{step:08d}"
        folder.mkdir()
        (folder / "state.json").touch()


def save_and_finish(run, *steps):
    save(run, *steps)
    return Evaluator(run, policy_at).finish()


def eventually(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_training_does_not_wait_and_pending_checkpoints_play_at_its_end(run, playback):
    playback.may.clear()
    data = ExecutionOptions()
    evaluator = Evaluator(run, policy_at)
    with evaluator.beside(run, data):
        save(run, 2, 3, 4)
        eventually(lambda: playback.steps == [2])
        save(run, 8)  # and the training is over
    assert evaluated(run) == []
    # The CPUs of the evaluation are excluded from data loading.
    assert data.exclude_resources.cpu == 1.5
    playback.may.set()
    assert evaluator.finish() == 0
    assert playback.steps == [2, 4, 8] and evaluated(run) == [2, 4, 8]
    main = threading.current_thread()
    assert playback.threads[0] is not main and playback.threads[2] is main


def test_played_checkpoint_is_scored_without_replay_after_kill(run, playback):
    """Its line was lost or cut off; lines of other checkpoints stay."""
    assert save_and_finish(run, 2) == 0
    path = run.job.output_dir / "evaluations.jsonl"
    path.write_text('{"step": 2, "epis')
    episodes = run.job.output_dir / "evaluations" / "step_00000002" / "episodes.jsonl"
    lines = [{**json.loads(line), "success_once": n > 0} for n, line in enumerate(episodes.read_text().splitlines())]
    episodes.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert save_and_finish(run, 4) == 0
    assert playback.steps == [2, 4]
    assert [(line["step"], line["successes"]) for line in evaluations(run.job.output_dir)] == [(2, 2), (4, 3)]


def test_retrained_checkpoint_is_evaluated_again(run, playback):
    """A resume from step 2 voids the evaluation of step 4."""
    start_attempt(run.job.output_dir, 0, 1)
    assert save_and_finish(run, 2, 4) == 0
    start_attempt(run.job.output_dir, 2, 1)
    assert evaluated(run) == [2]
    playback.succeeds = lambda episode: False
    assert save_and_finish(run) == 0
    assert playback.steps == [2, 4, 4]
    assert [(line["step"], line["successes"]) for line in evaluations(run.job.output_dir)] == [(2, 3), (4, 0)]


def test_scores_are_reported_per_task(run, playback, monkeypatch):
    assert save_and_finish(run, 4) == 0
    monkeypatch.setattr(during, "task_makers", lambda env: dict.fromkeys(("reach", "push")))
    playback.succeeds = lambda episode: episode.task == "push" and episode.episode > 0
    assert save_and_finish(run, 8) == 0
    of_one, of_two = evaluations(run.job.output_dir)
    assert "by_task" not in of_one and of_two["successes"] == 2
    by_task = [(row["label"], row["successes"], row["episodes"]) for row in of_two["by_task"]]
    assert by_task == [("reach", 0, 3), ("push", 2, 3)]


def test_stopped_run_aborts_evaluation_and_resumed_run_completes_it(run, playback):
    playback.may.clear()
    evaluator = Evaluator(run, policy_at)
    with evaluator.beside(run, ExecutionOptions()):
        save(run, 2)
        eventually(lambda: playback.steps == [2])
    evaluator.close()  # would block if it waited for the episodes
    assert not playback.may.is_set() and evaluated(run) == []
    playback.may.set()
    with Evaluator(run, policy_at).beside(run, ExecutionOptions()):
        eventually(lambda: evaluated(run) == [2])


def test_evaluation_runs_after_training_without_spare_capacity(run, playback, monkeypatch, capsys):
    monkeypatch.setattr(during.ray, "cluster_resources", lambda: {"CPU": 2.0})
    data = ExecutionOptions()
    evaluator = Evaluator(run, policy_at)
    with evaluator.beside(run, data):
        save(run, 2, 8)
        time.sleep(0.2)
        assert playback.steps == [] and not data.exclude_resources.cpu
    assert "after the training: beside it, it needs 1 CPU, 0.5 of the cluster's are to spare" in capsys.readouterr().out
    assert evaluator.finish() == 0
    printed = capsys.readouterr()
    assert playback.steps == [2, 8] and "step 4, 6 was not evaluated: its checkpoint is deleted" in printed.err


def test_evaluation_without_capacity_is_retried_on_resume(run, playback, capsys):
    playback.error = NoCapacityError("needs 1 CPU")
    evaluator = Evaluator(run, policy_at)
    with evaluator.beside(run, ExecutionOptions()):
        save(run, 2)
        eventually(lambda: not evaluator._thread.is_alive())
    assert "evaluation   after the training: needs 1 CPU" in capsys.readouterr().out
    assert evaluator.finish() == 5
    assert "step 2 was not evaluated: needs 1 CPU; --resume tries again" in capsys.readouterr().err
    playback.error = None
    assert evaluator.finish() == 0


def test_failed_evaluation_does_not_stop_training(run, playback, caplog):
    playback.error = ArithmeticError("the simulation diverged")
    evaluator = Evaluator(run, policy_at)
    with evaluator.beside(run, ExecutionOptions()):
        save(run, 2)
        eventually(lambda: "step 2 could not be evaluated" in caplog.text)
        playback.error = None
        save(run, 4)
        eventually(lambda: evaluated(run) == [4])
    assert evaluator.finish() == 0 and evaluated(run) == [2, 4]


def test_checkpoint_with_only_failed_episodes_is_evaluated_again(run, playback, caplog):
    playback.fails_with = "EGL is missing"
    assert save_and_finish(run, 2) != 0 and evaluated(run) == []
    assert "none of 3 episodes could be played, the first because of EGL is missing" in caplog.text
    playback.fails_with = None
    assert save_and_finish(run) == 0 and evaluated(run) == [2]


@pytest.mark.parametrize(
    ("cluster", "use_gpu", "stages", "lacks"),
    [
        ({"CPU": 3.5}, False, 2, None),
        ({"CPU": 2.5}, False, 1, None),
        ({"CPU": 2.4}, False, 0, "needs 1 CPU, 0.9 of the cluster's are to spare"),
        ({"CPU": 65.5, "GPU": 1}, True, 32, "needs 1 GPU, 0 of the cluster's are to spare"),
        ({"CPU": 65.5, "GPU": 2}, True, 32, None),
    ],
)
def test_spare_cluster_capacity(run, cluster, use_gpu, stages, lacks):
    scaling = replace(run.job.scaling, use_gpu=use_gpu)
    assert capacity_beside(scaling, run.config.eval, cluster) == (stages, lacks)


def test_unknown_environment_option_is_refused_before_training(setting, capsys):
    assert vla.main(flags(setting, **{"env.lenght": 3, "output_dir": setting[0] / "refused"})) == 2
    assert "its options are" in capsys.readouterr().err and not (setting[0] / "refused").exists()


def test_policy_with_masked_cameras_and_padded_state_is_accepted(setting, tmp_path):
    meta, camera = load_metadata(setting[1]), {"dtype": "video", "shape": (48, 48, 3), "names": ["h", "w", "c"]}
    state = {"dtype": "float32", "shape": (32,), "names": None}
    features = {**meta.features, "observation.images.base_0_rgb": camera, "observation.state": state}
    base = make_base(tmp_path / "base", meta, features=features, **TINY)
    changes = {"policy.path": base, "output_dir": tmp_path / "run", "dataset.missing_cameras": "mask"}
    run = resolve(parse_args(flags(setting, **changes)), gpus_found=0)
    # Exports by LeRobot keep the shapes of the base policy.
    assert run.policy.config.input_features["observation.state"].shape == (3,)
    run.policy.config.input_features["observation.state"] = PolicyFeature(type=FeatureType.STATE, shape=(32,))
    Evaluator(run, policy_at)
    other = replace(run.config, env_type="arm", env_options=())
    with pytest.raises(ValueError, match="the policy needs .*front"):
        Evaluator(replace(run, config=other), policy_at)


def test_environment_with_other_render_options_is_refused(run, monkeypatch):
    monkeypatch.setattr(during, "how_drawn", lambda meta: {"type": "two_bins", "image_size": [9, 8]})
    monkeypatch.setattr(configs, "how_drawn", lambda config: {"type": "two_bins", "image_size": [9, 9]})
    with pytest.raises(ValueError, match=r"images were rendered with other options.*give --env.image_size=\[9,8\]"):
        Evaluator(run, policy_at)


def test_action_rate_that_differs_from_environment_is_refused(run):
    run = replace(run, rows=replace(run.rows, features=replace(run.rows.features, window_steps=(2,))))
    with pytest.raises(ValueError, match="2 frames apart, 5 per second .*two_bins takes 10 per second: train without"):
        Evaluator(run, policy_at)
    Evaluator(replace(run, config=replace(run.config, env_options=("--fps=5",))), policy_at)


def test_packed_weights_round_trip():
    tied = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    tensors = {"a": tied, "b": tied, "c": tied.T, "d": torch.tensor(3), "e": torch.tensor([True, False])}
    stored = packed(tensors)
    assert stored["a"][0] is stored["b"][0]
    for name, tensor in unpacked(stored).items():
        assert tensor.dtype == tensors[name].dtype and torch.equal(tensor, tensors[name])
