"""Prompts without their padding: the same loss, and lengths that no kernel is known to compute wrongly."""

import numpy as np
import pytest
import torch

from tests.tiny import make_batch, make_policy, real_config
from vla_finetuning.policies.families.pi05 import PI05Loss, image_tokens
from vla_finetuning.policies.prompts import cut_prompts
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.trainable import choose_trainable

TOKENS, MASK = "observation.language.tokens", "observation.language.attention_mask"


def lengths_of(config, cameras):
    return family_of(config).prompt_lengths(config, cameras)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_cut_prompts_give_loss_and_gradients_of_padded_prompts(attention):
    torch.set_num_threads(1)
    policy = make_policy(2, tokenizer_max_length=120)
    choose_trainable(policy, "full")
    batch, noise, time = make_batch(policy)  # the longest prompt has 11 tokens
    lengths = lengths_of(policy.config, 2)
    cut = cut_prompts({key: batch[key].numpy() for key in (TOKENS, MASK)}, lengths)
    assert cut[TOKENS].shape == cut[MASK].shape == (4, 32)

    def computed(batch):
        policy.zero_grad()
        loss = PI05Loss(policy, attention=attention)(batch, noise, time)
        loss.backward()
        return loss.item(), torch.cat([p.grad.flatten() for p in policy.parameters() if p.requires_grad])

    loss, gradient = computed(batch | {key: torch.from_numpy(value) for key, value in cut.items()})
    expected, expected_gradient = computed(batch)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert ((gradient - expected_gradient).norm() / expected_gradient.norm()).item() < 2e-6


@pytest.mark.parametrize("cameras", [1, 2, 3])
def test_prompt_lengths_avoid_lengths_of_faulty_kernels(cameras):
    for chunk_size in range(1, 130, 3):
        config = real_config(cameras)
        config.chunk_size = chunk_size
        lengths = lengths_of(config, cameras)
        assert list(lengths) == sorted(set(lengths)) and 200 <= lengths[-1] < 240
        assert 5 <= len(lengths) <= 7
        for length in lengths:
            prefix = cameras * image_tokens(config) + length
            for keys in (prefix, prefix + chunk_size):
                assert keys % 32 != 1 and keys % 128 != 64


@pytest.mark.parametrize(
    "counts, length",
    [
        ([[1, 1, 0, 0, 0, 0]], 2),
        ([[1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]], 4),
        ([[1] * 6], 8),
        ([[0, 0, 0, 0, 1, 1]], 8),
    ],
    ids=["short", "longest row decides", "beyond tokenizer limit", "left padding"],
)
def test_cut_prompts_preserve_unmasked_tokens(counts, length):
    mask = np.array(counts, bool)
    tokens = np.arange(1, mask.size + 1).reshape(mask.shape)
    columns = {TOKENS: tokens, MASK: mask, "action": np.ones(3)}
    cut = cut_prompts(columns, (2, 4, 8))
    assert cut[TOKENS].shape == cut[MASK].shape == (len(mask), length)
    assert cut[TOKENS].dtype == tokens.dtype and cut[MASK].dtype == bool
    np.testing.assert_array_equal(cut[TOKENS][cut[MASK]], tokens[mask])
    assert cut["action"] is columns["action"] and columns[TOKENS] is tokens
