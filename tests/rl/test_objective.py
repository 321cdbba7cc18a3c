"""Objectives: advantages, losses and gradients, against torch, numpy and REINFORCE."""

import copy
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.rl.test_sampler import SDE, draw, inputs
from tests.tiny import make_policy
from vla_finetuning.options.grpo import GrpoOptions
from vla_finetuning.policies.families.pi05 import PI05Loss
from vla_finetuning.policies.value import advantages_and_targets, make_value_head
from vla_finetuning.rl.batches import equal_returns
from vla_finetuning.rl.objectives import objective_class
from vla_finetuning.rl.objectives.base import sum_means
from vla_finetuning.rl.objectives.grpo import GRPO, clipped
from vla_finetuning.rl.objectives.ppo import PPO
from vla_finetuning.rl.sampler import Walk, sample, score


def make_objective(loss, options):
    return objective_class(options.method)(loss, SDE, options)


def used_by(objective, returns, success=None):
    return objective.select_episodes(SimpleNamespace(returns=returns, success=success))


def test_advantages_and_used_episodes_per_group(loss):
    returns = torch.tensor([[1.0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1]])
    objective = GRPO(loss, SDE, GrpoOptions())
    advantages, used = objective.advantages(returns), used_by(objective, returns)
    expected = (returns - returns.mean(1, keepdim=True)) / (returns.std(1, keepdim=True) + 1e-6)
    torch.testing.assert_close(advantages, expected)
    assert used.any(1).tolist() == [True, False, False, True] and advantages[1:3].abs().max() == 0
    plain = GRPO(loss, SDE, GrpoOptions(normalise=False)).advantages(returns)
    torch.testing.assert_close(plain, returns - returns.mean(1, keepdim=True))
    # Imitation is of successes, also where rewards are costs or every step earns some.
    filtered = make_objective(loss, GrpoOptions(method="filtered", reward="return"))
    assert torch.equal(used_by(filtered, returns - 0.5, returns), returns == 1)
    # A failed episode is left out of its group, which may then have no difference left.
    nan = torch.nan
    failed = torch.tensor([[1.0, nan, 0, 1], [1, 0, 1, 1], [nan, nan, nan, 1], [1, 1, nan, 1]])
    with warnings.catch_warnings(action="error"):
        advantages, used = objective.advantages(failed), used_by(objective, failed)
    for row, played in ((0, [0, 2, 3]), (1, [0, 1, 2, 3])):
        group = failed[row, played].double().numpy()
        expected = torch.from_numpy((group - group.mean()) / (group.std(ddof=1) + 1e-6))
        torch.testing.assert_close(advantages[row, played].double(), expected)
    assert used.tolist() == [[True, False, True, True], [True] * 4, [False] * 4, [False] * 4]
    assert not advantages[~used].any() and equal_returns(failed).tolist() == [False, False, True, True]
    assert used_by(filtered, failed, failed).sum() == 2 + 3 + 1 + 3
    # A critic compares decisions of all episodes, unless all rewards are zero.
    ppo = PPO(loss, SDE, GrpoOptions(method="ppo"))
    assert torch.equal(used_by(ppo, failed), failed.isfinite())
    assert used_by(ppo, returns).all() and used_by(ppo, returns).shape == returns.shape
    assert not used_by(ppo, 0 * returns).any() and used_by(ppo, -returns).all()


def test_clipped_loss_matches_ppo_and_flags_zero_gradient():
    ratio = torch.tensor([0.5, 0.9, 1.0, 1.25, 1.5, 3.0, 5.0]).repeat(2).requires_grad_()
    advantage = torch.tensor([2.0] * 7 + [-2.0] * 7)
    loss, flat = clipped(ratio, advantage, 0.2, 0.3, dual=3.0)
    expected = [-0.5, -0.9, -1, -1.25, -1.3, -1.3, -1.3, 0.8, 0.9, 1, 1.25, 1.5, 3.0, 3.0]
    torch.testing.assert_close(loss.detach(), 2 * torch.tensor(expected))
    (gradient,) = torch.autograd.grad(loss.sum(), ratio)
    assert torch.equal(gradient == 0, flat)
    torch.testing.assert_close(clipped(ratio, advantage, 0.2, 0.3, None)[0].detach()[-1], torch.tensor(10.0))


def micro_batch(loss, rows=6, *, advantage=None, seed=0):
    batch = inputs(loss, rows)
    chunk, walk = sample(loss, batch, SDE, draw(SDE, loss, rows, seed))
    with torch.no_grad():
        old = score(loss, batch, SDE, walk)[0]
    advantage = torch.linspace(-1.5, 1, rows) if advantage is None else advantage
    columns = {"weight": torch.ones(rows), "advantage": advantage, "old": old, "action": chunk}
    return batch | {"x": walk.x, "after": walk.after, "step_numbers": walk.step_numbers} | columns


def gradients(objective, batch):
    objective = copy.deepcopy(objective)
    value = objective(batch)
    value.backward()
    return value.detach(), {n: p.grad for n, p in objective.loss.named_parameters() if p.grad is not None}, objective


def close(actual, expected, tolerance=1e-5):
    assert actual.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], atol=tolerance * largest, rtol=1e-3)


def test_first_ratio_is_one_and_gradient_equals_reinforce(loss):
    batch = micro_batch(loss)
    value, actual, objective = gradients(make_objective(loss, GrpoOptions()), batch)
    means = sum_means(objective.sums)
    assert means["ratio_off"] == means["kl"] == means["clipped"] == 0.0
    torch.testing.assert_close(value, -batch["advantage"].sum())
    plain = copy.deepcopy(loss)
    (-batch["advantage"][:, None] * score(plain, batch, SDE, walk_of(batch))[0]).mean(1).sum().backward()
    close(actual, {n: p.grad for n, p in plain.named_parameters() if p.grad is not None})


def walk_of(batch):
    return Walk(batch["x"], batch["after"], batch["step_numbers"])


@pytest.mark.parametrize("method", ["grpo", "filtered"])
def test_rows_of_weight_zero_have_no_effect(loss, method):
    objective = make_objective(loss, GrpoOptions(method=method, kl=0.1 if method == "grpo" else 0.0))
    batch = micro_batch(loss)
    generator = torch.Generator().manual_seed(3)
    batch["noise"] = torch.randn(batch["x"][:, 0].shape, generator=generator)
    batch["time"] = torch.rand(6, generator=generator)
    batch["start_mean"] = batch["after"] + 0.1
    batch["action_is_pad"] = torch.zeros(batch["noise"].shape[:2], dtype=torch.bool)
    value, expected, plain = gradients(objective, {key: v[:4] for key, v in batch.items()})
    padded = {**batch, "weight": torch.tensor([1.0, 1, 1, 1, 0, 0])}
    padded["old"] = torch.cat([batch["old"][:4], torch.full_like(batch["old"][4:], -1e4)])
    padded_value, actual, after = gradients(objective, padded)
    torch.testing.assert_close(padded_value, value, atol=1e-4, rtol=1e-5)
    close(actual, expected)
    np.testing.assert_allclose(list(sum_means(after.sums).values()), list(sum_means(plain.sums).values()), atol=2e-3)


def test_kl_to_start_policy_equals_torch_normal_kl(loss):
    batch = micro_batch(loss, advantage=torch.zeros(6))
    other = PI05Loss(make_policy(seed=1))
    with torch.no_grad():
        _, start, _ = score(other, batch, SDE, walk_of(batch))
        _, mean, std = score(loss, batch, SDE, walk_of(batch))
    deviation = std[:, :, None, None].expand_as(mean)
    normals = (torch.distributions.Normal(m, deviation) for m in (mean, start))
    expected = torch.distributions.kl_divergence(*normals).sum((2, 3)).mean(1).sum()
    divergence = make_objective(loss, GrpoOptions(kl=0.5))({**batch, "start_mean": start})
    torch.testing.assert_close(divergence, 0.5 * expected, rtol=1e-4, atol=1e-5)


# ---- the critic of ppo ----------------------------------------------------------------------------------------------


def test_gae_equals_sum_of_discounted_td_errors():
    """As in the definition, where ours goes backwards once (Schulman et al., equation 16)."""
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=7).tolist(), rng.normal(size=7).tolist()
    for after in (0.0, 2.5):
        errors = [r + 0.9 * later - v for r, v, later in zip(rewards, values, [*values[1:], after], strict=True)]
        expected = [sum(0.72 ** (k - t) * errors[k] for k in range(t, 7)) for t in range(7)]
        advantages, targets = advantages_and_targets(rewards, values, 0.9, 0.8, after=after)
        np.testing.assert_allclose(advantages, expected)
        np.testing.assert_allclose(targets, np.add(expected, values))
    assert advantages_and_targets([], [], 0.9, 0.8) == ([], [])


def test_value_head_equals_plain_attention_without_policy_gradient(loss):
    batch = inputs(loss, 4)
    head = make_value_head(loss.value_layers(), seed=3, outputs=2)
    with torch.no_grad():
        head.output.weight.normal_()
    prefix = loss.prefix(loss.images(batch))
    values = head(prefix)
    assert values.shape == (4, 2) and values.dtype == torch.float32
    for row in range(4):  # one row, head and layer after the other
        read = []
        for query, (key, value) in zip(head.queries, prefix.keys_values, strict=True):
            for number in range(len(query)):
                scores = key[row, number] @ query[number, 0] / query.shape[-1] ** 0.5 + prefix.bias[row, 0, 0]
                read.append(scores.softmax(0) @ value[row, number])
        hidden = torch.nn.functional.silu(head.hidden(head.norm(torch.cat(read))))
        torch.testing.assert_close(head.output(hidden), values[row], atol=1e-5, rtol=1e-4)
    values.sum().backward()
    assert all(parameter.grad is None for parameter in loss.parameters())
    assert all(parameter.grad is not None for parameter in head.parameters())
    state = torch.get_rng_state()
    assert torch.equal(make_value_head(loss.value_layers(), 3).queries[0], head.queries[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_ppo_policy_gradient_equals_grpo_for_equal_advantages(loss):
    batch = micro_batch(loss)
    batch |= {"value": torch.zeros(6), "target": torch.linspace(0, 1, 6)}
    (grpo_value, expected, _), (ppo_value, actual, ppo) = (
        gradients(make_objective(loss, GrpoOptions(method=method)), batch) for method in ("grpo", "ppo")
    )
    close(actual, expected)
    assert ppo.critic.output.bias.grad.abs().max() > 0 and ppo_value > grpo_value
