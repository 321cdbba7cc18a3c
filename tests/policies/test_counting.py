"""Operations and tokens of a step, counted from configurations, against LeRobot's own forward and by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.policies.flow_policies import pi0_config, smolvla_config
from tests.tiny import make_batch, make_config, make_policy, real_config, reference
from tests.tiny_backbones import smolvlm
from vla_finetuning.policies.counting import flops_by_prompt, flops_per_sample
from vla_finetuning.policies.meta import meta_policy
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.trainable import choose_trainable


def lerobots_flops(config, mode):
    policy = meta_policy(config)
    choose_trainable(policy, mode)
    with torch.device("meta"):
        batch = {key: torch.empty(1, *f.shape) for key, f in config.image_features.items()}
        images, masks = policy._preprocess_images(batch)
        tokens = (1, config.tokenizer_max_length)
        tokens, language_mask = torch.empty(tokens, dtype=torch.int64), torch.empty(tokens, dtype=torch.bool)
        actions = torch.empty(1, 6, 32)
        with FlopCounterMode(display=False) as counter:
            losses = policy.model.forward(images, masks, tokens, language_mask, actions, actions, torch.empty(1))
            losses.mean().backward()
    return counter.get_total_flops()


def test_counted_flops_are_below_lerobot():
    config = make_config(3, depth=2)
    expert, full = (flops_per_sample(config, 3, mode) for mode in ("expert", "full"))
    assert 0 < expert < 0.7 * lerobots_flops(config, "expert")
    assert expert < 0.5 * full < full < lerobots_flops(config, "full")
    two, three = (flops_per_sample(config, 3, "expert", draws) for draws in (2, 3))
    assert expert < two < 1.5 * expert and three - two == two - expert  # the prefix is counted once


def test_token_count_equals_lerobot_sequence():
    policy, cameras = make_policy(3), 3
    batch, noise, time = make_batch(policy)
    theirs, lengths = reference(policy, noise, time), []
    joint = theirs.model.paligemma_with_expert
    forward = joint.forward

    def note(**arguments):
        lengths.append(arguments["position_ids"].shape[1])
        return forward(**arguments)

    joint.forward = note
    theirs.forward(batch)
    family = family_of(policy.config)
    assert lengths == [family.tokens(policy.config, cameras)]
    assert family.tokens(policy.config, cameras, 3) == lengths[0] + 2 * policy.config.chunk_size


def test_flops_and_tokens_of_real_pi05():
    """4.14 B parameters, 3 cameras, 200 tokens, chunks of 50; LeRobot's plain autograd takes 8.64 T in this mode."""
    assert flops_per_sample(real_config(), 3, "expert") / 1e12 == pytest.approx(4.53, rel=0.01)
    assert family_of(real_config()).tokens(real_config(), 3) == 3 * 256 + 200 + 50


def test_flops_and_tokens_of_real_pi0():
    """2 FLOP per weight and token forward and 4 backward: 2.3 B weights of images and language, 0.3 B of actions."""
    sizes = {"chunk_size": 50, "n_action_steps": 50, "max_action_dim": 32, "max_state_dim": 32}
    config = pi0_config(3, image_resolution=(224, 224), tokenizer_max_length=48, **sizes)
    prefix, suffix = 3 * 256 + 48, 51
    expected = 2 * 2.3e9 * prefix + 6 * 0.3e9 * suffix
    assert flops_per_sample(config, 3, "expert") == pytest.approx(expected, rel=0.1)
    assert family_of(config).tokens(config, 3) == prefix + suffix


def test_flops_and_tokens_of_real_smolvla(tmp_path):
    """Sizes of SmolVLM2-500M: of a row, 646 GFLOP in the vision tower at 512 x 512 and 110 in language and expert."""
    text = {"hidden_size": 960, "intermediate_size": 2560, "num_attention_heads": 15, "num_key_value_heads": 5}
    vision = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    real = smolvlm(
        tmp_path,
        text={**text, "head_dim": 64, "num_hidden_layers": 16},
        vision={**vision, "image_size": 512, "patch_size": 16},
        scale_factor=4,
    )
    sizes = {"chunk_size": 50, "n_action_steps": 50, "max_action_dim": 32, "max_state_dim": 32}
    options = {"resize_imgs_with_padding": (512, 512), "num_vlm_layers": 16, "tokenizer_max_length": 48}
    config = smolvla_config(real, 3, **sizes, **options)
    assert family_of(config).tokens(config, 3) == 3 * 64 + 48 + 1 + 50
    assert flops_per_sample(config, 3, "expert") == pytest.approx(756e9, rel=0.05)


def test_flops_of_all_prompt_lengths_follow_from_three():
    config, prompts = make_config(1, depth=2), (4, 9, 33, 50)
    actual = flops_by_prompt(config, 1, "full", 2, prompts)
    assert actual[9] == flops_per_sample(config, 1, "full", 2, 9) and list(actual) == list(prompts)
    assert flops_by_prompt(config, 1, "full", 2, (9,)) == {9: actual[9]}
