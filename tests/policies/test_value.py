"""The value function against NumPy and torch: distribution, loss, trainable parameters."""

from dataclasses import replace

import numpy as np
import torch

from tests.tiny import make_batch, make_policy
from vla_finetuning.columns import RETURN
from vla_finetuning.policies.compiling import Compiler
from vla_finetuning.policies.families.pi05 import PI05Loss
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.trainable import choose_trainable
from vla_finetuning.policies.value import ValueLoss, two_bins

BINS = 11


def test_two_bins_average_to_return():
    returns = np.array([-1.0, -0.97, -0.5, -0.4321, -0.05, 0.0, -2.5, 0.3], np.float32)
    actual = two_bins(torch.from_numpy(returns), BINS).numpy()
    centres, expected = np.linspace(-1, 0, BINS), np.zeros((len(returns), BINS))
    for row, value in enumerate(np.clip(returns, -1, 0)):
        for bin, centre in enumerate(centres):  # a triangle around each centre
            expected[row, bin] = max(0.0, 1.0 - abs(value - centre) * (BINS - 1))
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    np.testing.assert_allclose(actual @ centres, np.clip(returns, -1, 0), atol=1e-6)


def make_loss(seed=0):
    return ValueLoss(PI05Loss(make_policy()), BINS, seed)


def test_value_loss_trains_only_head_by_default():
    loss = make_loss()
    batch = {**make_batch(loss.policy, 3)[0], RETURN: torch.tensor([-1.0, -0.5, 0.0])}
    before = {name: value.clone() for name, value in loss.policy.state_dict().items()}
    optimizer = torch.optim.AdamW([p for p in loss.parameters() if p.requires_grad], lr=1e-2)
    first = loss(batch)
    for _ in range(30):
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()
    assert {name.partition(".")[0] for name, p in loss.named_parameters() if p.requires_grad} == {"critic"}
    assert all(torch.equal(value, before[name]) for name, value in loss.policy.state_dict().items())
    assert loss(batch) < first / 2
    assert torch.allclose(loss.value(batch), batch[RETURN], atol=0.15)


def test_value_loss_with_backbone_trains_vision_and_language():
    policy = make_policy()
    choose_trainable(policy, "full")
    loss = ValueLoss(PI05Loss(policy), BINS, 0, backbone=True)
    torch.nn.init.normal_(loss.critic.output.weight)
    loss({**make_batch(policy, 3)[0], RETURN: torch.tensor([-1.0, -0.5, 0.0])}).backward()
    parts = family_of(policy.config).parts(policy)
    with_gradient = {parts[name] for name, p in policy.named_parameters() if p.grad is not None and p.grad.any()}
    trains = {parts[name] for name, p in policy.named_parameters() if p.requires_grad}
    assert with_gradient == trains == {"language model", "vision"}
    assert all(p.grad is not None for p in loss.parameters() if p.requires_grad)


def test_value_loss_is_row_weighted_cross_entropy():
    loss = make_loss()
    torch.nn.init.normal_(loss.critic.output.weight)
    returns = torch.tensor([-0.8, -0.33, -0.1])
    batch = {**make_batch(loss.policy, 3)[0], RETURN: returns}
    expected = torch.nn.functional.cross_entropy(loss.logits(batch), two_bins(returns, BINS), reduction="none")
    torch.testing.assert_close(loss(batch, per_row=True), expected)
    torch.testing.assert_close(loss(batch), expected.mean())
    weight = torch.tensor([0.0, 1.0, 2.0])
    torch.testing.assert_close(loss({**batch, "row_weight": weight}), (expected * weight).mean())


def test_value_head_is_float32_under_autocast():
    """Advantages are small differences of values, which bfloat16 would round away."""
    loss = make_loss()
    torch.nn.init.normal_(loss.critic.output.weight)
    batch = make_batch(loss.policy, 3)[0]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        policy_loss = loss._policy_loss[0]
        prefix = policy_loss.prefix(loss.images(batch))
        assert prefix.keys_values[0][0].dtype == torch.bfloat16
        logits, value = loss.logits(batch), loss.value(batch)
    with torch.no_grad():
        in_float32 = [(key.float(), value.float()) for key, value in prefix.keys_values]
        expected = loss.critic(replace(prefix, keys_values=in_float32))
    assert torch.equal(logits, expected) and logits.dtype == value.dtype == torch.float32
    exact = (expected.double().softmax(dim=1) * torch.linspace(-1, 0, BINS, dtype=torch.float64)).sum(dim=1)
    torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=1e-7)


def test_value_loss_exposes_compiler_of_policy():
    compiler = Compiler("eager")
    assert ValueLoss(PI05Loss(make_policy(), compile=compiler), BINS, 0).compiler is compiler
    assert make_loss().compiler is None
