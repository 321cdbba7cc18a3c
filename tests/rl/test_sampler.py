"""The random sampler, against PyTorch's densities and LeRobot's sampler."""

import copy
from unittest import mock

import numpy as np
import pytest
import torch

from tests.tiny import ACTION_DIM, make_batch
from vla_finetuning.policies.flow import continue_chunk
from vla_finetuning.rl.sampler import Draws, FlowSDE, Walk, sample, score

SDE = FlowSDE(steps=5, noise_level=0.6)


def inputs(loss, rows=6):
    batch, _, _ = make_batch(loss.policy, rows)
    return {key: value for key, value in batch.items() if "action" not in key}


def draw(sde, loss, rows, seed=0):
    config = loss.policy.config
    shape = (config.chunk_size, config.max_action_dim, ACTION_DIM)
    return sde.draw([np.random.default_rng([seed, row]) for row in range(rows)], shape)


@pytest.mark.parametrize("one", [False, True])
def test_scores_equal_torch_normal_density_of_lerobot_velocity(loss, one):
    """Mean and deviation of every recorded step, and the drawn actions themselves."""
    sde, batch = FlowSDE(5, 0.6, one), inputs(loss)
    draws = draw(sde, loss, 6)
    chunk, walk = sample(loss, batch, sde, draws)
    scores, _, _ = score(loss, batch, sde, walk)
    assert scores.shape == (6, 1 if one else 5)
    images, masks = loss.policy._preprocess_images(loss.images(batch))
    model = loss.policy.model
    language = batch["observation.language.tokens"], batch["observation.language.attention_mask"]
    for nth in range(scores.shape[1]):
        numbers = walk.step_numbers[:, nth]
        t = 1 - numbers / 5
        with torch.no_grad():
            embedded = model.embed_prefix(images, masks, *language)
            velocity = lerobots_velocity(model, embedded, walk.x[:, nth], t)[..., :ACTION_DIM]
        x = walk.x[:, nth, :, :ACTION_DIM]
        now = t[:, None, None]
        sigma = 0.6 * (now / (1 - torch.where(now == 1, torch.tensor(0.8), now))).sqrt()
        mean = x - 0.2 * velocity - sigma**2 * 0.2 / (2 * now) * (x + (1 - now) * velocity)
        density = torch.distributions.Normal(mean, sigma * 0.2**0.5).log_prob(walk.after[:, nth]).sum((1, 2))
        torch.testing.assert_close(scores[:, nth], density, atol=2e-3, rtol=1e-4)
        drawn = mean + sigma * 0.2**0.5 * draws.noise[torch.arange(6), numbers]
        torch.testing.assert_close(walk.after[:, nth], drawn, atol=1e-4, rtol=1e-4)
    if not one:
        assert torch.equal(chunk, walk.after[:, -1])


def lerobots_velocity(model, embedded, x, t):
    from lerobot.policies.common.vla_utils import make_att_2d_masks, prepare_attention_masks_4d

    embeddings, pads, attention = embedded
    masks = prepare_attention_masks_4d(make_att_2d_masks(pads, attention))
    model.paligemma_with_expert.paligemma.model.language_model.config._attn_implementation = "eager"
    _, cache = model.paligemma_with_expert.forward(
        attention_mask=masks, position_ids=torch.cumsum(pads, dim=1) - 1, past_key_values=None,
        inputs_embeds=[embeddings, None], use_cache=True,
    )  # fmt: skip
    return model.denoise_step(prefix_pad_masks=pads, past_key_values=cache, x_t=x, timestep=t)


def test_sampler_without_noise_equals_lerobot(loss, monkeypatch):
    steps = 10
    monkeypatch.setattr(loss.policy.config, "num_inference_steps", steps)
    batch, draws = inputs(loss), draw(SDE, loss, 6)
    expected = loss.policy.predict_action_chunk(loss.images(batch), noise=draws.start)
    torch.testing.assert_close(continue_chunk(loss, batch, draws.start), expected, atol=2e-6, rtol=1e-5)
    ode = FlowSDE(steps, 0.0)
    chunk, _ = sample(loss, batch, ode, draw(ode, loss, 6)._replace(start=draws.start))
    torch.testing.assert_close(chunk, expected, atol=5e-6, rtol=1e-5)


class Mixture(torch.nn.Module):
    """In place of a network: the exact velocity towards two narrow Gaussians at +1 and -1, in every coordinate."""

    def __init__(self, spread=0.1, at=1.0):
        super().__init__()
        self.spread, self.at, self.images = spread, at, lambda batch: batch

    def prefix(self, batch):
        return None

    def velocity(self, x, time, prefix):
        t = time[:, None, None]
        variance = (1 - t) ** 2 * self.spread**2 + t**2
        weight = torch.tanh((1 - t) * self.at * x / variance)  # which of the two, on average
        mean = weight * self.at
        data = mean + (1 - t) * self.spread**2 / variance * (x - (1 - t) * mean)  # E[action | x]
        noise = (x - (1 - t) * data) / t
        return noise - data


@pytest.mark.parametrize("one", [False, True])
def test_sde_marginals_equal_ode_marginals(one):
    """For a velocity that is known exactly; in many steps, as both are discretised."""
    rows, steps, width = 4000, 60, 3
    sde = FlowSDE(steps, 0.6, one)
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(rows, 1, width, generator=generator)
    noise = torch.randn(rows, steps, 1, width, generator=generator)
    numbers = torch.randint(steps, (rows, 1), generator=generator) if one else torch.arange(steps).expand(rows, -1)
    network = Mixture()
    sampled, _ = sample(network, {}, sde, Draws(start, noise, numbers))
    x = torch.randn(rows, 1, width, generator=generator)
    for number in range(steps):
        time = torch.full((rows,), 1 - number / steps)
        x = x - network.velocity(x, time, None) / steps
    levels = torch.tensor([0.02, 0.1, 0.25, 0.4, 0.6, 0.75, 0.9, 0.98])  # away from the gap
    difference = sampled.flatten().quantile(levels) - x.flatten().quantile(levels)
    assert difference.abs().max() < 0.05


def test_score_gradient_of_all_steps_equals_sum_over_single_steps(loss):
    """All steps of a decision share one suffix over one prefix."""
    batch, draws = inputs(loss), draw(SDE, loss, 6)
    _, walk = sample(loss, batch, SDE, draws)
    together, separate = copy.deepcopy(loss), copy.deepcopy(loss)
    score(together, batch, SDE, walk)[0].sum().backward()
    for number in range(SDE.steps):
        step = Walk(*(tensor[:, number : number + 1] for tensor in walk))
        score(separate, batch, SDE, step)[0].sum().backward()
    expected = {name: p.grad for name, p in separate.named_parameters() if p.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, parameter in together.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5 * largest, rtol=1e-3)


def test_only_executed_actions_are_scored(loss, executed=2):
    """Their density is torch's, of the whole chunk's means; other predicted actions have no gradient."""
    batch, draws = inputs(loss), draw(SDE, loss, 6)
    _, walk = sample(loss, batch, SDE, draws)
    _, means, stds = score(loss, batch, SDE, walk)  # of whole chunks
    velocities = []

    def retaining(*arguments):
        velocities.append(velocity(*arguments))
        velocities[-1].retain_grad()
        return velocities[-1]

    velocity = loss.velocity
    with mock.patch.object(loss, "velocity", retaining):
        scores, mean, _ = score(loss, batch, SDE, walk.executed(executed))
    normal = torch.distributions.Normal(means[:, :, :executed], stds[:, :, None, None])
    expected = normal.log_prob(walk.after[:, :, :executed]).sum((2, 3))
    torch.testing.assert_close(scores, expected, atol=1e-3, rtol=1e-4)
    assert mean.shape == (6, 5, executed, ACTION_DIM)
    scores.sum().backward()
    gradient = velocities[0].grad.abs().amax(0)
    assert gradient[:executed, :ACTION_DIM].min() > 0
    assert gradient[executed:].sum() == 0 and gradient[:, ACTION_DIM:].sum() == 0
    # Actions that are not executed do not change the score.
    changed = walk.after.clone()
    changed[:, :, executed:] += 100.0
    assert torch.equal(score(loss, batch, SDE, walk._replace(after=changed).executed(executed))[0], scores)
    loss.zero_grad()
