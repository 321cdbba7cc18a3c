"""The loop of grpo.py without Ray: resume, ranks, rollouts and plan, against plain computations and LeRobot."""

import contextlib
import gc
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from lerobot.envs.utils import preprocess_observation
from lerobot.policies.factory import make_pre_post_processors
from safetensors.torch import load_file

import grpo
from tests.evaluation import several  # noqa: F401  # registers an environment with lists of initial states
from tests.in_process import CPU, TINY, Rank, in_ranks
from tests.rollouts import test_player
from vla_finetuning.envs.configs import task_makers
from vla_finetuning.envs.two_bins_scene import AXES, INSTRUCTIONS
from vla_finetuning.options.command_line import parse_grpo
from vla_finetuning.rl import batches, before_after, groups, loop, sampler
from vla_finetuning.rl.actor import Actor, StochasticActor, deterministic
from vla_finetuning.rl.batches import RolloutBatch, RolloutGroup
from vla_finetuning.rl.expected import Simulated, expected_times, worker_memory
from vla_finetuning.rl.objectives import ppo
from vla_finetuning.rl.objectives.base import sum_means
from vla_finetuning.rl.objectives.ppo import PPO
from vla_finetuning.rl.resolve import decision_bytes, describe_grpo, resolve_grpo
from vla_finetuning.rollouts.episodes import Episode, Playing, line_of
from vla_finetuning.rollouts.player import Acting, Player
from vla_finetuning.rollouts.stage import Stage
from vla_finetuning.run.checkpoint import check_resumable, latest_checkpoint
from vla_finetuning.training import state
from vla_finetuning.training.export import export, exported_checkpoint
from vla_finetuning.training.model import build_model


class LocalRollouts:
    """Stand in for `Scheduler` with a stage in this process; every third episode succeeds.

    With seed 13 none does, and with seed 14 none of the first round's odd groups.
    """

    def __init__(self, scene, seed):
        self._stage, self._seed = Stage(task_makers(scene.env), 16, 60.0), seed

    def _worth(self, number):
        alike = self._seed == 13 or (self._seed == 14 and number < 12 and number // 3 % 2)
        return float(number % 3 == 0 and not alike)

    def play_here(self, episodes, decide, bootstraps=False):
        starts = [Playing(number, episode, bootstraps=bootstraps) for number, episode in episodes.items()]
        ended, chunks, played = {}, {number: [] for number in episodes}, {}
        (_, decisions), observations = self._stage.advance(starts)
        while decisions:
            actions = decide(observations, decisions)
            for decision, chunk in zip(decisions, actions, strict=True):
                chunks[decision.number].append(chunk)
            (over, decisions), observations = self._stage.advance([], actions)
            ended |= over
        for n, line in sorted(ended.items()):
            worth = self._worth(n)
            rewards = (*[0.0] * (len(line["rewards"]) - 1), worth)
            line |= {"success_once": worth > 0, "total_reward": worth, "rewards": rewards}
            played[n] = line, np.concatenate(chunks[n])[: line["steps"]]
        return played

    def take_seconds(self):
        return 0.0, 0.0

    def close(self):
        pass


def train_as(run, rank=0, world=1):
    rollouts = mock.patch.object(loop, "make_rollouts", lambda run: LocalRollouts(run.scene, run.config.seed))
    # In the process of all tests a collection takes longer than an iteration.
    with rollouts, mock.patch.object(state, "log_to"), mock.patch.object(gc, "collect", lambda *_: 0):
        return grpo.train(run, Rank(rank, world))


def make_base(folder, **options):
    stats = {"q01": [-20.0, 4, 3], "q99": [20.0, 30, 16], "mean": [0.0] * 3, "std": [1.0] * 3}
    stats = dict.fromkeys(("observation.state", "action"), stats)
    return test_player.make_base(folder, list(INSTRUCTIONS.values()), names=AXES, stats=stats, **TINY, **options)


def resolved(base, folder, **changes):
    options = {
        **{"policy.path": base, "env.type": "two_bins", "env.episode_length": 20, "output_dir": folder},
        **{"train.mode": "full", "scaling.use_gpu": "false", "scaling.num_workers": 1, "batch_size": 8, "lr": 1e-3},
        **{"grpo.groups": 4, "grpo.group_size": 3, "grpo.reward": "return", "grpo.minibatch": 6, "grpo.iterations": 2},
        **{"grpo.flow_steps": 3, "grpo.eval_every": 2, "eval.n_episodes": 4, "save_freq": 2, "grpo.target_kl": "null"},
        **changes,
    }
    flags = [f"--{name}={value}" for name, value in options.items() if value is not None]
    run = resolve_grpo(parse_grpo(flags), 0)
    run.job.output_dir.mkdir(exist_ok=True)
    run.job.checkpoints_dir.mkdir(exist_ok=True)
    return run


def train(run, rank=0, world=1):
    """Train; return the last checkpoint's parameters and Adam state, and the log lines."""
    assert train_as(run, rank, world)
    return saved(run), metrics(run)


def saved(run):
    newest = latest_checkpoint(run.job.checkpoints_dir)
    return {name: value for file in newest.rglob("*.safetensors") for name, value in load_file(file).items()}


def equal(tensors, expected):
    return all(torch.equal(tensors[name], expected[name]) for name in tensors)


def metrics(run):
    lines = [json.loads(line) for line in (run.job.output_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.endswith("_s") or k == "loss"} for line in lines]


def test_resumed_training_is_bitwise_equal_to_uninterrupted(base, tmp_path):
    """Also with groups that are resampled, and beside a checkpoint that a killed process left unfinished."""
    changes = {"grpo.kl": 0.01, "seed": 14, "grpo.resample": 1}
    uninterrupted, lines = train(resolved(base, tmp_path / "whole", **changes, **{"grpo.iterations": 4}))
    train(resolved(base, tmp_path / "parts", **changes))
    unfinished = tmp_path / "parts" / "checkpoints" / "step_00000003" / "attempt-00000" / "trainable.safetensors"
    unfinished.parent.mkdir(parents=True)
    unfinished.touch()
    resumed, lines_of_resumed = train(resolved(base, tmp_path / "parts", **changes, **{"grpo.iterations": 4}))
    assert equal(uninterrupted, resumed) and lines == lines_of_resumed and not unfinished.exists()
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4] and lines[4]["episodes"] == 72
    assert [line["step"] for line in lines if "held_out_episodes" in line] == [0, 2, 4]
    start = resolved(base, tmp_path / "whole", **changes).policy.start().state_dict()
    assert max(float((uninterrupted[name] - start[name]).abs().max()) for name in start if name in uninterrupted) > 1e-4
    assert lines[1]["updates"] == 2 * -(-lines[1]["used"] // 6) and lines[1]["mixed_groups"] == 1
    assert not equal(uninterrupted, train(resolved(base, tmp_path / "reseeded", **changes | {"seed": 5}))[0])


def failing(monkeypatch, fails):
    """Make episodes fail, as `Scheduler` does, if `fails(number, whether the policy explores)`."""
    play = LocalRollouts.play_here

    def play_some(self, episodes, decide, **options):
        played = play(self, episodes, decide, **options)
        for number in [number for number in episodes if fails(number, isinstance(decide, StochasticActor))]:
            played[number] = line_of(episodes[number], 0, error="the simulation diverged"), None
        return played

    monkeypatch.setattr(LocalRollouts, "play_here", play_some)


def test_failed_episodes_are_excluded_from_training_also_after_resume(base, tmp_path, monkeypatch):
    """The second group of every iteration, one episode of the third, and two held-out ones."""
    failing(monkeypatch, lambda number, explores: number in ((3, 4, 5, 7) if explores else (0, 1)))
    options = {"grpo.method": "ppo", "save_freq": 1, "grpo.eval_every": 1}
    uninterrupted, lines = train(resolved(base, tmp_path / "whole", **options))
    train(resolved(base, tmp_path / "parts", **options, **{"grpo.iterations": 1}))
    resumed, lines_of_resumed = train(resolved(base, tmp_path / "parts", **options))
    assert equal(uninterrupted, resumed) and lines == lines_of_resumed
    assert [line["episodes_failed"] for line in lines[1:]] == [4, 4] and lines[2]["episodes"] == 24
    assert [(line["held_out_episodes"], line["held_out_errors"]) for line in lines] == [(2, 2)] * 3
    assert lines[1]["mixed_groups"] == 0.75 and lines[1]["return"] == pytest.approx(3 / 8)
    assert all(np.isfinite(line["loss"]) and line["updates"] for line in lines[1:])
    failing(monkeypatch, lambda number, explores: explores)
    with pytest.raises(ValueError, match="none of 12 episodes .* because of the simulation diverged: repair the env"):
        train(resolved(base, tmp_path / "none", **options))


def test_time_limit_bootstraps_value_of_final_state(base, tmp_path):
    """The final state is judged by the critic, and is no decision to learn from."""
    bootstraps = {"grpo.method": "ppo", "grpo.bootstrap_time_limit": "true"}
    with mock.patch.object(ppo, "advantages_and_targets", wraps=ppo.advantages_and_targets) as computed:
        _, lines = train(resolved(base, tmp_path / "run", **bootstraps))
    after = [call.args[4] for call in computed.call_args_list]
    # The critic begins with zero. All 12 episodes take their 20 steps, of two decisions.
    assert not any(after[:12]) and all(after[12:]) and len(set(after[12:])) > 6
    assert {len(call.args[1]) for call in computed.call_args_list} == {2}
    assert {(line["used"], line["decisions"], line["env_steps"]) for line in lines[1:]} == {(24, 24, 240)}


def test_first_update_ratio_is_exactly_one(base, tmp_path):
    """Old densities are recomputed in the update's own micro-batches."""
    _, lines = train(resolved(base, tmp_path / "run", **{"grpo.minibatch": 1000, "grpo.epochs": 1, "batch_size": 5}))
    assert [(line["ratio_off"], line["updates"]) for line in lines[1:]] == [(0.0, 1)] * 2 and lines[1]["kl"] == 0.0


def test_iteration_without_used_episodes_has_no_rows_on_any_rank(monkeypatch):
    """With ppo and two workers there is nothing to judge or gather."""
    monkeypatch.setattr(batches.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(batches.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(batches.dist, "all_gather_into_tensor", lambda ranks, mine: None)
    assert batches.stack_ranks(torch.zeros(3, 0)).shape == (2, 3, 0)
    config = parse_grpo(["--preset=demo", "--grpo.method=ppo", "--grpo.groups=2", "--grpo.group_size=2"])
    line = {"error": None, "success_once": False, "success_decision": None, "rewards": (0.0,) * 3}
    group = RolloutGroup(np.arange(4).reshape(2, 2), dict.fromkeys(range(4), line), "success")
    explorer = SimpleNamespace(iteration=1, columns=lambda: {}, rows=lambda *_: [])
    actor = SimpleNamespace(computing=contextlib.nullcontext, on_device=dict, device=CPU)
    objective = PPO.__new__(PPO)
    torch.nn.Module.__init__(objective)
    objective.options = config.grpo
    rollouts = RolloutBatch(config, actor, explorer, group, objective.select_episodes(group), worker=Rank(0, 2))
    objective.prepare(rollouts, group, None)
    assert rollouts.rows == 0 and list(rollouts.epoch(0)) == []
    assert objective.metrics(rollouts, sum_means(torch.zeros(7)))["explained_variance"] is None


def test_restarted_run_logs_initial_policy_once(tmp_path, monkeypatch):
    run = SimpleNamespace(job=SimpleNamespace(output_dir=tmp_path), options=SimpleNamespace(eval_every=2))
    training = SimpleNamespace(run=run, worker=Rank(0, 1), rollouts=None, actor=None, every=lambda _: False)
    monkeypatch.setattr(loop, "held_out", lambda *_: {"held_out_successes": 3})
    monkeypatch.setattr(loop, "Times", lambda: SimpleNamespace(gather=lambda *_: {}, mark=lambda _: None))
    for _ in range(2):
        training.step = 0
        lines = loop.IterationLines(training)
        lines.on_start(training)
        training.step = 1
        lines.on_log(training, {})
    loop.IterationLines(training).on_start(training)
    assert [line["step"] for line in metrics(run)] == [0, 1]


def test_robot_prefix_of_instructions_is_applied_and_exported(base, tmp_path):
    """Of a policy that was trained with --dataset.robot_in_prompt."""
    folder = Path(shutil.copytree(base, tmp_path / "base"))
    (folder / "robot.json").write_text(json.dumps({"robot": "arm", "instructions_begin_with": "arm: "}))
    run = resolved(folder, tmp_path / "run", **{"grpo.iterations": 1})
    with mock.patch.object(Player, "prepare", autospec=True, side_effect=Player.prepare) as prepare:
        train(run)
    assert {call.args[0]._acting.opening for call in prepare.call_args_list} == {"arm: "}
    export(run.policy, exported_checkpoint(run.job, False), run.job.output_dir)
    exported = json.loads((run.job.output_dir / "pretrained_model" / "robot.json").read_text())
    assert exported["instructions_begin_with"] == "arm: "
    with pytest.raises(ValueError, match="--grpo.demonstrations: instructions of policy .* begin with 'arm: '"):
        resolved(folder, tmp_path / "other", **{"grpo.method": "filtered", "grpo.demonstrations": tmp_path})


def test_updates_stop_at_target_kl(base, tmp_path):
    _, lines = train(resolved(base, tmp_path / "run", lr=0.01, **{"grpo.target_kl": 1e-6, "grpo.iterations": 1}))
    assert lines[1]["updates"] == 2  # the first, which moves the policy, and the one that measures it


def test_only_executed_actions_are_stored_and_scored(base, tmp_path, monkeypatch):
    """Four of ten; the network receives the whole chunk, and the plan counts the bytes that are stored."""
    run = resolved(base, tmp_path / "run", **{"policy.n_action_steps": 4, "grpo.iterations": 1})
    stored, columns = [], StochasticActor.columns
    monkeypatch.setattr(StochasticActor, "columns", lambda self: stored.append(columns(self)) or stored[-1])
    with mock.patch.object(sampler, "log_prob", wraps=sampler.log_prob) as log_prob:
        _, lines = train(run)
    assert {tuple(tensor.shape[1:]) for call in log_prob.call_args_list for tensor in call.args[:2]} == {(4, 3)}
    assert lines[1]["updates"] > 0 and lines[1]["ratio_off"] > 0
    assert stored[0]["x"].shape[1:] == (3, 10, run.policy.config.max_action_dim)
    walk = sum(stored[0][name][0].nbytes for name in ("x", "after", "action"))
    images = sum(value[0].nbytes for value in stored[0].values() if value.dtype == torch.uint8)
    tokens = 9 * run.policy.config.tokenizer_max_length
    assert decision_bytes(run.scene.env, run.policy.config, run.sde) == walk + images + tokens


@pytest.mark.parametrize("explore", [True, False])
def test_relative_actions_across_inference_batches_match_lerobot(tmp_path, explore):
    """Five decisions, two at once: LeRobot's processors make each row's actions absolute from its own state."""
    folder = make_base(tmp_path / "base", use_relative_actions=True)
    run = resolved(folder, tmp_path / "run", **{"grpo.inference_batch": 2})
    loss, autocast = build_model(run.policy, CPU)
    player = Player(loss.policy, *run.policy.processors(), Acting(env=run.scene.env))
    actor = Actor(loss, player, prompts=run.policy.prompts, inference_batch=2, autocast=autocast, device=CPU)
    stage = Stage(task_makers(run.scene.env), 5, 60.0)
    episodes = {n: Episode("plain", "two_bins", n, 50 + n) for n in range(5)}
    (_, decisions), observations = stage.advance([Playing(number, episode) for number, episode in episodes.items()])
    decide = StochasticActor(actor, run.sde, 0, 0) if explore else deterministic(actor, 0, episodes)
    with mock.patch.object(player, "to_env", wraps=player.to_env) as to_env:
        actions = decide(observations, decisions)
    pre, post = make_pre_post_processors(loss.policy.config, pretrained_path=str(folder))
    for row, chunk in enumerate(torch.cat([call.args[0] for call in to_env.call_args_list])):
        observation = {key: value[row : row + 1] for key, value in observations.items() if key != "pixels"}
        observation["pixels"] = {name: image[row : row + 1] for name, image in observations["pixels"].items()}
        pre({**preprocess_observation(observation), "task": [decisions[row].instruction]})
        np.testing.assert_allclose(actions[row], post(chunk[None])[0].numpy(), atol=1e-5)
    assert len({tuple(state) for state in observations["agent_pos"].tolist()}) == 5


def two(rank, world, run):
    train_as(run, rank, world)


@pytest.mark.parametrize(("method", "resample", "kl"), [("grpo", 0, 0.1), ("ppo", 1, 0.0)])
def test_two_ranks_equal_one_with_twice_the_groups(base, tmp_path, method, resample, kl):
    """Micro-batches differ in size, and a rank may have none of a minibatch's rows, or of the resampled groups.

    With seed 14 and no resampling, one rank has nothing to learn from at all.
    """
    changes = {"grpo.minibatch": 3, "grpo.iterations": 1, "batch_size": 2, "lr": 1e-6, "seed": 14}
    changes |= {"grpo.method": method, "grpo.resample": resample, "grpo.kl": kl}
    one_rank, lines = train(resolved(base, tmp_path / "one", **changes))
    run = resolved(base, tmp_path / "two", **changes, **{"scaling.num_workers": 2})
    in_ranks(two, run, world=2)
    two_ranks = saved(run)
    moments = [name for name in one_rank if name.startswith("exp_avg.")]
    largest = max(float(one_rank[name].abs().max()) for name in moments)
    for name in moments:
        torch.testing.assert_close(two_ranks[name], one_rank[name], atol=2e-3 * largest, rtol=0.02)
    keys = ("success", "decisions", "used", "updates", "held_out_successes", "loss", "kl_start", "resampled_groups")
    for expected, actual in zip(lines, metrics(run), strict=True):
        for key in keys:
            assert expected.get(key) == pytest.approx(actual.get(key), rel=1e-3, abs=1e-4), key
    assert lines[1]["resampled_groups"] == 2 * resample
    assert lines[1]["mixed_groups"] == (1 if resample else 0.5)
    # Seconds of both ranks add up to the iteration, whichever waited where.
    line = json.loads((run.job.output_dir / "metrics.jsonl").read_text().splitlines()[-1])
    spent = sum(line[f"{name}_s"] for name in ("play", "score", "update", "held_out"))
    assert -0.001 < line["step_s"] - spent < 0.5 * line["step_s"]  # each is rounded


def test_ppo_advantages_equal_plain_gae_and_export_omits_critic(base, tmp_path):
    run = resolved(base, tmp_path / "run", **{"grpo.method": "ppo", "grpo.value_lr": 0.01})
    with mock.patch.object(PPO, "prepare", autospec=True, side_effect=PPO.prepare) as prepare:
        trained, lines = train(run)
    _, rollouts, group, _ = prepare.call_args.args
    raw = torch.zeros(rollouts.rows)
    for episode in range(12):
        rows = np.flatnonzero(rollouts.episode == episode)
        values = [*rollouts.values["value"][rows].tolist(), 0.0]
        rewards = group.rewards(int(group.numbers.flat[episode]))
        assert len(rewards) == len(rows) == group.decisions[episode]
        errors = [rewards[t] + 0.99 * values[t + 1] - values[t] for t in range(len(rows))]
        for t, row in enumerate(rows):
            raw[row] = sum((0.99 * 0.95) ** (k - t) * errors[k] for k in range(t, len(rows)))
            assert float(rollouts.values["target"][row]) == pytest.approx(float(raw[row]) + values[t], abs=1e-5)
    normalised = (raw - raw.mean()) / raw.std(correction=0)
    torch.testing.assert_close(rollouts.values["advantage"], normalised, atol=1e-4, rtol=1e-4)
    assert lines[1]["used"] == lines[1]["decisions"]  # of every group
    assert lines[1]["explained_variance"] == pytest.approx(0, abs=1e-6) and lines[-1]["value_loss"] > 0
    assert any("critic." in name for name in trained) and lines[1]["ratio_off"] > 0
    export(run.policy, exported_checkpoint(run.job, best=False), run.job.output_dir)
    exported = load_file(run.job.output_dir / "pretrained_model" / "model.safetensors")
    assert not [name for name in exported if "critic" in name]
    shared = [name for name in exported if name in trained]
    assert shared and all(torch.equal(exported[name], trained[name]) for name in shared)


def test_success_reward_is_given_at_successful_decision():
    line = {"rewards": (0.5, 2.0, -1.0), "success_decision": 1}
    lines = {0: line, 1: {**line, "success_decision": None}}
    success, returns = (RolloutGroup(np.arange(2)[None], lines, reward) for reward in ("success", "return"))
    assert success.rewards(0) == [0, 1, 0] and success.rewards(1) == [0, 0, 0]
    assert returns.rewards(0) == [0.5, 2.0, -1.0]


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_constant_rewards_are_refused_after_first_iteration(base, tmp_path):
    run = resolved(base, tmp_path / "run", seed=13)
    with pytest.raises(ValueError, match="0 of 12 episodes succeeded.*more imitation.*--grpo.noise_level"):
        train(run)
    group = SimpleNamespace(returns=torch.ones(4, 3), success=torch.ones(4, 3))
    with pytest.raises(ValueError, match="succeeds in every episode already: choose a harder"):
        groups.check_first(run.options, 0, group, torch.zeros(4, 3))
    groups.check_first(run.options, 1, group, torch.zeros(4, 3))  # later it may happen


def test_nondeterministic_reset_is_refused():
    lines = {n: {"initial_state": str(n == 1), "error": None} for n in range(3)}
    with pytest.raises(ValueError, match="reset.* does not decide"):
        groups._check_alike(lines, 3)
    groups._check_alike({3: lines[0], 1: lines[1]}, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grpo.groups": 3, "scaling.num_workers": 2}, "equally many groups; give 4"),
        ({"lr": "null"}, "--lr=null: expected a number, above 0"),
        ({"scaling.strategy": "fsdp2"}, "use --scaling.strategy=ddp"),
        ({"env.type": "nowhere"}, "LeRobot knows no such environment"),
        ({"grpo.kl": 0.1, "grpo.method": "filtered"}, "--grpo.kl=0.1 with --grpo.method=filtered: .* leave it out"),
        ({"grpo.clip_low": 0.1, "grpo.method": "filtered"}, "--grpo.clip_low=0.1 with --grpo.method=filtered: .*leave"),
        ({"grpo.normalise": "false", "grpo.method": "ppo"}, "--grpo.normalise=false with --grpo.method=ppo: only grpo"),
        ({"policy.repo_id": "a/b"}, "--policy.repo_id has no effect .*; python -m vla_finetuning.run.push"),
        ({"grpo.resample": 1, "grpo.method": "filtered"}, "--grpo.resample=1 with --grpo.method=filtered"),
        ({"grpo.bootstrap_time_limit": "true"}, "--grpo.bootstrap_time_limit.*--grpo.method=ppo"),
        ({"train.compile": "true"}, "--train.compile=true: decisions come in batches of any size"),
        ({"rename_map": '{"observation.images.top": "observation.images.other"}'}, "the policy needs"),
        ({"rename_map": '{"observation.images.tpo": "observation.images.top"}'}, "does not show .*tpo; it shows .*top"),
    ],
)
def test_invalid_options_are_refused_by_name(base, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        resolved(base, tmp_path / "run", **changes)


def test_policy_without_action_density_is_refused(base, tmp_path):
    config = json.loads((base / "config.json").read_text())
    folder = Path(shutil.copytree(base, tmp_path / "act"))
    shared = {key: config[key] for key in ("input_features", "output_features", "device")}
    (folder / "config.json").write_text(json.dumps({"type": "act", **shared}))
    with pytest.raises(ValueError, match="type 'act'.*probability"):
        resolved(folder, tmp_path / "run")


def test_plan_estimates_iteration_time_memory_and_bottleneck(base, tmp_path):
    """12 episodes of 20 steps that look twice each, in two processes."""

    def estimate(run, *seconds):
        return "\n".join(expected_times(run, Simulated(*seconds)))

    def with_options(**options):
        return replace(run, config=replace(run.config, grpo=replace(run.options, **options)))

    run, seconds = resolved(base, tmp_path / "run"), (0.5, 0.01, 0.1)
    text = estimate(run, *seconds)
    assert "simulation 5.40 s an iteration" in text and "an iteration " not in text.partition("TFLOP")[2]
    scaling = replace(run.config.scaling, use_gpu=True, accelerator_type="H100")
    run = replace(run, config=replace(run.config, scaling=scaling))
    plain = worker_memory(run)
    assert worker_memory(with_options(kl=0.1)).needed - plain.needed == plain.weights > 0  # of the initial policy
    text = estimate(run, *seconds)
    assert "on a H100 at 35% of its peak (assumed)" in text and "an iteration 5 s" in text
    assert "the simulation is the bottleneck: --grpo.env_actors 12, one for each episode of a worker" in text
    assert "simulation 0.90 s an iteration, on 12 processes" in estimate(with_options(env_actors=40), *seconds)
    assert "bottleneck" not in estimate(run, 0.0, 0.0, 0.0)
    assert "simulation 32 s an iteration" in estimate(run, 5.0, 0.01, 0.1)
    plan = describe_grpo(with_options(resample=2))
    assert "are replaced, at most 2 times: at most 72 episodes" in plan and "per worker: 72 decisions of" in plan


# ---- lists of initial states ----------------------------------------------------------------------------------------


def in_lists(base, folder, **changes):
    """Three tasks with three initial states each, of which the last is reserved."""
    lists = {"env.type": "several", "env.episode_length": 10, "grpo.reserved_states": 1, "grpo.iterations": 3}
    return resolved(base, folder, **{**lists, "eval.n_episodes": 2, **changes})


def test_training_groups_avoid_reserved_initial_states(base, tmp_path, monkeypatch):
    """By the state hash of the environment after its reset."""
    run, states = in_lists(base, tmp_path / "run", **{"grpo.iterations": 2}), {True: [], False: []}
    play = LocalRollouts.play_here

    def record_states(self, episodes, decide, **options):
        played = play(self, episodes, decide, **options)
        states[isinstance(decide, StochasticActor)] += [
            (line["task"], line["seed"], line["initial_state"]) for line, _ in played.values()
        ]
        return played

    monkeypatch.setattr(LocalRollouts, "play_here", record_states)
    assert train_as(run)

    def index_of(task, seed, state):
        env = task_makers(run.scene.env)[task]()
        for number in range(3):
            env.unwrapped.init_state_id = number
            env.reset(seed=seed)
            if env.unwrapped.state_hash() == state:
                return number
        raise AssertionError

    assert {index_of(*start) for start in states[True]} == {0, 1}
    assert {index_of(*start) for start in states[False]} == {2}
    assert {task for task, *_ in states[True]} == {"near/0", "near/1", "far/0"}


def test_replaced_group_uses_another_initial_state(base, tmp_path, monkeypatch):
    """Six groups use each of two states of three tasks once."""
    run, rounds = in_lists(base, tmp_path / "run", **{"grpo.groups": 6}), []
    rollouts = SimpleNamespace(play_here=lambda episodes, *_, **__: rounds.append(episodes) or {})
    monkeypatch.setattr(groups, "RolloutGroup", lambda *_: None)
    for replacement in (0, 1):
        explorer, worker = SimpleNamespace(iteration=0, seed=0), SimpleNamespace(rank=0, world=1)
        groups.play_groups(run, rollouts, explorer, worker, range(6), replacement)
    first, second = ([(episode.task, episode.episode % 3) for episode in each.values()] for each in rounds)
    assert set(first) == set(second) and not any(map(tuple.__eq__, first, second))


def test_before_after_episodes_use_reserved_initial_states(base, tmp_path, monkeypatch):
    """With noise other than that of the held-out ones; remote code of both policies is trusted as in training."""
    run, fresh, trusted = in_lists(base, tmp_path / "run", **{"policy.trust_remote_code": "true"}), [], []
    (run.job.output_dir / "pretrained_model").symlink_to(base)

    def play_all(episodes, conditions, sources, *_, **__):
        trusted.extend(source.trusted for source in sources.values())
        fresh.extend(one.episode for one in episodes if (one.condition, one.task) == ("after", "far/0"))
        return []

    monkeypatch.setattr(before_after, "play_all", play_all)
    before_after.before_and_after(run)
    held_out = [run.scene.eval_number("far/0", i) for i in range(run.config.eval.n_episodes)]
    assert trusted == [True, True] and {number % 3 for number in [*held_out, *fresh]} == {2}
    assert len({*held_out, *fresh}) == len(held_out) + -(-before_after.FRESH_EPISODES // 3)


def test_plan_lists_reserved_states_and_resume_requires_the_same(base, tmp_path):
    run, unreserved = (in_lists(base, tmp_path / f"{n}", **{"grpo.reserved_states": n}) for n in (1, 0))
    plan = describe_grpo(run)
    assert "Held out     6 episodes before the first iteration and every 2, by the deterministic sampler" in plan
    assert "9 initial states in 3 lists, one per task: 6 train, 2.0 groups begin in each" in plan
    assert "3 are held out of training, for evaluation: the last 1 per task (initial_states.json)" in plan
    timed = describe_grpo(resolved(base, tmp_path / "other", save_every_s=60, keep_best=1))
    assert "States" not in timed
    assert "every 2 iterations, after 60 s, and at the end, keeping the last 2 and the 1 best by success in tr" in timed
    assert "evaluation is on states that were trained" in describe_grpo(unreserved)
    assert unreserved.job.start.stream["reserved"]["far/0"] == []  # as in runs of earlier versions
    with pytest.raises(ValueError, match="near/0 has 3 initial states, and --grpo.reserved_states=3 .* give fewer"):
        in_lists(base, tmp_path / "all", **{"grpo.reserved_states": 3})
    two_reserved = in_lists(base, tmp_path / "other", **{"grpo.reserved_states": 2}).job.start
    with pytest.raises(ValueError, match=r"reserved: was .*\[2\].*, is .*\[1, 2\]"):
        check_resumable(run.job.start, two_reserved)
