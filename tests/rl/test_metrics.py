"""Every number in grpo.py's metrics.jsonl against a plain computation of it: numpy on the episodes and the updates.

A key without a computation here fails the test, but for seconds. Log-densities and values are those of `Objective`,
which other tests compare with torch's; advantages of ppo are compared in `test_learning`.
"""

import copy
import gc
import json
from unittest import mock

import numpy as np
import pytest
import torch

import grpo
from tests.in_process import Rank
from tests.rl.test_learning import LocalRollouts, resolved
from util import TrainableOptimizer
from vla_finetuning.rl import loop
from vla_finetuning.rl.actor import StochasticActor
from vla_finetuning.rl.objectives import objective_class
from vla_finetuning.rl.objectives.grpo import GRPO
from vla_finetuning.run.checkpoint import load_progress
from vla_finetuning.training import state

GROUPS, SIZE, ITERATIONS, PEAK_LR, WARMUP, KL, HELD_OUT = 4, 3, 2, 0.01, 1, 0.02, 4
TIMES = ["play", "score", "update", "held_out", "step", "inference", "waiting", "simulation", "rendering"]
NONFINITE = 1  # the number of the update whose gradient is not finite


class Watched:
    """A run in this process that records its episodes and updates."""

    def __init__(self, run):
        self.run, self.rng = run, np.random.default_rng(0)
        self.plays, self.updates, self.norms, self.iterations = [], [], [], 0
        self.start = self.before = None

    def train(self):
        watched, step = self, TrainableOptimizer.step
        objective_type = objective_class(self.run.options.method)
        forward, score = objective_type.forward, GRPO.score_rollouts
        take_step, train_step = loop.GrpoState.take_step, loop.train_step

        class Rollouts(LocalRollouts):
            def play_here(self, episodes, decide, bootstraps=False):
                return watched.play(super().play_here(episodes, decide), isinstance(decide, StochasticActor))

        def scored(objective, rollouts, start):
            self.start = self.start or copy.deepcopy(objective)
            self.before = copy.deepcopy(objective)
            return score(objective, rollouts, start)

        def forwarded(objective, batch, *draws):
            self.updates[-1]["micros"].append(self.note(objective, batch))
            loss = forward(objective, batch, *draws)
            self.updates[-1]["micros"][-1]["returned"] = loss.item()
            return loss

        def updated(optimizer, number, *clock):
            if len(self.norms) == NONFINITE:
                optimizer.params[0].grad[:] = torch.nan
            gradients = [p.grad.double().numpy() for p in optimizer.params if p.grad is not None]
            self.norms.append(np.sqrt(sum((gradient**2).sum() for gradient in gradients)))
            return step(optimizer, number, *clock)

        def trained(*arguments, **options):
            self.updates.append({"iteration": self.iterations, "micros": []})
            return train_step(*arguments, **options)

        def iteration(state, batches):
            self.iterations += 1
            return take_step(state, batches)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "make_rollouts", lambda run: Rollouts(run.scene, run.config.seed))
            patch.setattr(state, "log_to", mock.Mock())
            patch.setattr(gc, "collect", lambda *_: 0)  # it takes longer than an iteration in the process of all tests
            patch.setattr(GRPO, "score_rollouts", scored)
            patch.setattr(objective_type, "forward", forwarded)
            patch.setattr(TrainableOptimizer, "step", updated)
            patch.setattr(loop, "train_step", trained)
            patch.setattr(loop.GrpoState, "take_step", iteration)
            assert grpo.train(self.run, Rank())
        return [json.loads(line) for line in (self.run.job.output_dir / "metrics.jsonl").read_text().splitlines()]

    def play(self, played, explores):
        """Draw outcomes; all first groups but one end alike, and one episode of the last iteration fails."""
        for place, (line, _) in enumerate(played.values()):
            rewards = tuple(self.rng.integers(0, 3, len(line["rewards"])).astype(float))
            if explores and not any(play["explores"] for play in self.plays) and place >= SIZE:
                rewards = (1.0, *[0.0] * (len(rewards) - 1))
            when = int(self.rng.integers(len(rewards))) if self.rng.random() < 0.4 else None
            line |= {"success_once": when is not None, "success_decision": when, "success_at_end": when == 0}
            line |= {"rewards": rewards, "total_reward": sum(rewards)}
            if not explores:  # two episodes begin in each state
                line |= {"initial_state": f"{place // 2}", "instruction": "go"}
        failed = min(played) if explores and self.iterations == ITERATIONS and min(played) < SIZE else None
        if failed is not None:
            line, _ = played[failed]
            played[failed] = {**dict.fromkeys(line), "task": line["task"], "seed": 7, "error": "died"}, None
        lines = {number: line for number, (line, _) in played.items() if number != failed}
        play = {"iteration": self.iterations, "explores": explores, "lines": lines}
        self.plays.append(play | {"failed": len(played) - len(lines)})
        return played

    @torch.no_grad()
    def note(self, objective, batch):
        """Score the rows of a micro-batch by the policy now, before the iteration's updates, and at the start."""
        scores = {"weight": batch["weight"]}
        if objective.options.method != "filtered":
            now, mean, std = objective.score(batch)
            before, _, _ = self.before.score(batch)
            scores |= {"change": now - before, "advantage": batch["advantage"]}
            scores["away"] = ((mean - self.start.score(batch)[1]) / std[:, :, None, None]).square() / 2
        if objective.critic is not None:
            images = objective.loss.images(batch)
            scores["value"] = objective.values(objective.loss.prefix(images))
            scores["old_value"] = self.before.values(self.before.loss.prefix(images))
            scores["target"] = batch["target"]
        return {name: value.double().numpy() for name, value in scores.items()}


def surrogate(change, advantage, options):
    """PPO's loss of each step with a bound for bad episodes, and where its derivative by the ratio is zero."""
    ratio, advantage = np.exp(change), np.broadcast_to(advantage[:, None], change.shape)
    bounded = np.clip(ratio, 1 - options.clip_low, 1 + options.clip_high)
    gain = np.minimum(ratio * advantage, bounded * advantage)
    flat = np.where(advantage > 0, ratio > 1 + options.clip_high, (advantage < 0) & (ratio < 1 - options.clip_low))
    bound = (advantage < 0) & (gain < options.dual_clip * advantage)
    return -np.where(bound, options.dual_clip * advantage, gain), flat | bound


def expected_lines(watched):
    options, lines, episodes, first = watched.run.options, [], 0, 0
    for iteration in range(ITERATIONS + 1):
        plays = [play for play in watched.plays if play["iteration"] == iteration]
        explored = [play["lines"] for play in plays if play["explores"]]
        held_out = [episode for play in plays if not play["explores"] for episode in play["lines"].values()]
        line = {"step": iteration}
        updates = [update["micros"] for update in watched.updates if update["iteration"] == iteration]
        if iteration:
            ended = [episode for played in explored for episode in played.values()]
            failed = sum(play["failed"] for play in plays)
            episodes += len(ended) + failed

            def worth(episode):
                return float(episode["success_once"]) if options.reward == "success" else episode["total_reward"]

            seeds = {number // SIZE: episode["seed"] for played in explored for number, episode in played.items()}
            assert len(set(seeds.values())) == len(seeds)
            groups = {}  # the last played round of a group counts
            for played in explored:
                for number, episode in played.items():
                    replacement, group = divmod(number // SIZE, GROUPS)
                    groups.setdefault((group, replacement), []).append(episode)
            groups = [groups[max(key for key in groups if key[0] == group)] for group in range(GROUPS)]
            mixed = [group for group in groups if len({worth(episode) for episode in group}) > 1]
            used = {
                "grpo": [episode for group in mixed for episode in group],
                "ppo": [episode for group in groups for episode in group],
                "filtered": [episode for group in groups for episode in group if episode["success_once"]],
            }[options.method]
            micros = [micro for micros in updates for micro in micros]
            if options.method == "grpo":
                learned = sorted(row for micro in micros for row in micro["advantage"])
                assert learned == pytest.approx(sorted(options.epochs * advantages(mixed, worth)), abs=1e-5)
            norms = watched.norms[first : first + len(updates)]
            first += len(updates)
            line |= {
                "episodes": episodes,
                "lr": PEAK_LR * min(1.0, iteration / (WARMUP + 1)),
                "success": np.mean([episode["success_once"] for episode in ended]),
                "return": np.mean([worth(episode) for episode in ended]),
                "mixed_groups": len(mixed) / GROUPS,
                "episodes_failed": failed,
                "resampled_groups": (len(ended) + failed) / SIZE - GROUPS,
                "decisions": sum(len(episode["rewards"]) for episode in ended),
                "used": sum(len(episode["rewards"]) for episode in used),
                "demonstrated": 0,
                "env_steps": sum(episode["steps"] for episode in ended),
                "updates": len(updates),
                "nonfinite_steps": sum(not np.isfinite(norm) for norm in norms),
                "grad_norm": np.mean(norms),
                "peak_memory_bytes": None,
                **of_updates(options, micros),
            }
        if held_out:
            line["held_out_episodes"] = HELD_OUT
            for outcome, suffix in (("success_once", ""), ("success_at_end", "_at_end")):
                wins = sum(episode[outcome] for episode in held_out)
                line |= {f"held_out_successes{suffix}": wins, f"held_out_interval{suffix}": wilson(wins / HELD_OUT, 2)}
            line["held_out_scenes"] = 2
        lines.append(line)
    return lines


def wilson(share, n, z=1.959963984540054):
    """Wilson's interval of 95 %, by the formula of 1927."""
    half = z * np.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    return [(share + z**2 / (2 * n) + side * half) / (1 + z**2 / n) for side in (-1, 1)]


def advantages(groups, worth):
    """The advantage of each decision: how many standard deviations its episode is above its group's mean."""
    rows = []
    for group in groups:
        returns = np.array([worth(episode) for episode in group])
        for episode, advantage in zip(group, (returns - returns.mean()) / (returns.std(ddof=1) + 1e-6), strict=True):
            rows += [advantage] * len(episode["rewards"])
    return rows


def of_updates(options, micros):
    """Means over the rows of an iteration's updates."""
    rows = {name: np.concatenate([micro[name] for micro in micros]) for name in micros[0] if name != "returned"}
    assert (rows.pop("weight") == 1).all()
    if options.method == "filtered":
        loss = sum(micro["returned"] for micro in micros) / sum(len(micro["weight"]) for micro in micros)
        empty = {"kl": None, "kl_start": None, "clipped": 0, "ratio_off": 0}
        return {"loss": loss, **empty, "value_loss": None, "explained_variance": None}
    losses, flat = surrogate(rows["change"], rows["advantage"], options)
    dimensions = rows["away"][0, 0].size
    change, away = rows["change"], rows["away"].sum((2, 3))
    means = {
        "loss": np.mean(losses + options.kl * away),
        "kl": np.mean(np.exp(change) - 1 - change) / dimensions,
        "kl_start": np.mean(away) / dimensions if options.kl else None,
        "clipped": np.mean(flat),
        "ratio_off": np.abs(np.exp(change) - 1).max(),
        "value_loss": None,
        "explained_variance": None,
    }
    if options.method == "ppo":
        value, old, target = (rows[name] for name in ("value", "old_value", "target"))
        moved = old + np.clip(value - old, -options.value_clip, options.value_clip)
        means["value_loss"] = np.mean(np.maximum((value - target) ** 2, (moved - target) ** 2)) / 2
        means["explained_variance"] = 1 - np.var(target - old) / np.var(target)
    return means


CASES = {
    "grpo": {"grpo.kl": KL, "grpo.resample": 2},
    "ppo": {"grpo.reward": "success", "grpo.value_lr": 0.1, "grpo.value_clip": 0.05},
    "filtered": {},
}


@pytest.mark.parametrize("method", CASES)
def test_metrics_equal_plain_numpy_computation(base, tmp_path, method):
    options = {"grpo.method": method, "grpo.groups": GROUPS, "grpo.group_size": SIZE, "grpo.iterations": ITERATIONS}
    options |= {"lr": PEAK_LR, "grpo.warmup": WARMUP, "eval.n_episodes": HELD_OUT, "train.max_nonfinite": 1}
    watched = Watched(resolved(base, tmp_path / "run", **options, **CASES[method]))
    lines, expected = watched.train(), expected_lines(watched)
    assert [line["step"] for line in lines] == [0, 1, 2] and len(expected) == 3
    for line, plain in zip(lines, expected, strict=True):
        seconds = {key for key in line if key.endswith("_s") and key != "checkpoint_pause_s"}
        assert seconds == {f"{name}_s" for name in TIMES}
        line = {key: value for key, value in line.items() if not key.endswith("_s")}
        assert line.keys() == plain.keys(), "a key of metrics.jsonl without a plain computation, or one too many"
        for key, value in plain.items():
            near = value if value is None else pytest.approx(value, rel=2e-3, abs=1e-5, nan_ok=True)
            assert line[key] == near, (line["step"], key)
    assert [line.get("episodes_failed") for line in lines] == [None, 0, 1]
    assert [line.get("nonfinite_steps") for line in lines] == [None, 1, 0]
    assert [("held_out_episodes" in line) for line in lines] == [True, False, True]
    assert 0 < lines[2]["success"] < 1 and lines[1]["lr"] < lines[2]["lr"] == PEAK_LR
    (checkpoint,) = watched.run.job.checkpoints_dir.glob("step_*")
    assert load_progress(checkpoint).loss == -np.mean([lines[1]["success"], lines[2]["success"]])
    if method != "filtered":
        assert 0 < lines[2]["clipped"] < 1 and lines[2]["kl"] > 1e-4
    else:
        more = resolved(base, tmp_path / "none", **options | {"train.max_nonfinite": 0})
        with pytest.raises(FloatingPointError, match="1 steps .*more than --train.max_nonfinite=0.*lower --lr"):
            Watched(more).train()
    if method == "grpo":
        assert lines[1]["resampled_groups"] >= GROUPS - 1 and lines[2]["kl_start"] > lines[2]["kl"]
