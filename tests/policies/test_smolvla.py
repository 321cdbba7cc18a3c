"""SmolVLA's loss against LeRobot's own, beyond the shared tests of `test_flow_losses.py`."""

import copy

import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionEmbeddings

from tests.policies.flow_policies import CHUNK, ROWS, lerobots, make_batch
from tests.policies.flow_policies import make_policy as make_flow_policy
from vla_finetuning.policies.families.smolvla import SmolVLALoss, patch_places
from vla_finetuning.policies.family import MEAN_COUNT
from vla_finetuning.policies.trainable import choose_trainable


def make_policy(backbone, **options):
    return make_flow_policy("smolvla", backbone, **options)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("expert", {}),
        ("expert", {"train_state_proj": False}),
        ("full", {"train_expert_only": False}),
        ("full", {"train_expert_only": False, "freeze_vision_encoder": False}),
        ("full", {"train_expert_only": False, "attention_mode": "self_attn", "num_expert_layers": 2}),
    ],
)
def test_train_mode_equals_lerobot_options(backbone, mode, options):
    policy = make_policy(backbone, **options)
    theirs = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    choose_trainable(policy, mode)
    assert {name for name, parameter in policy.named_parameters() if parameter.requires_grad} == theirs


def test_unread_row_equals_absent_row(backbone):
    policy = make_policy(backbone)
    batch, noise, time = make_batch(policy)
    read = torch.tensor([True, False, True])
    expected, _ = lerobots(policy, {key: value[read] for key, value in batch.items()}, noise[read], time[read])
    batch["action"][1] = 1e6
    torch.testing.assert_close(SmolVLALoss(policy)({**batch, "is_read": read}, noise, time), expected)


def test_mean_over_parts_of_step_equals_lerobot_over_whole(backbone):
    policy, draws = make_policy(backbone), 2
    batch, noise, time = make_batch(policy, draws=draws)
    expected = sum(lerobots(policy, batch, noise[draw::draws], time[draw::draws])[0] for draw in range(draws)) / draws
    loss, recorded = SmolVLALoss(policy), []
    for rows in (slice(0, 1), slice(1, 3)):
        part = {key: value[rows] for key, value in batch.items()}
        part[MEAN_COUNT] = loss.count(batch) / 2
        of_draws = slice(rows.start * draws, rows.stop * draws)
        recorded.append(loss(part, noise[of_draws], time[of_draws]))
    torch.testing.assert_close(sum(recorded) / 2, expected)


def test_aloha_space_equals_lerobot_and_leaves_batch(backbone):
    policy = make_policy(backbone, adapt_to_pi_aloha=True, max_state_dim=16, max_action_dim=16)
    policy.config.output_features["action"] = PolicyFeature(FeatureType.ACTION, (14,))
    batch, _, time = make_batch(policy)
    batch |= {"observation.state": torch.rand(ROWS, 14), "action": torch.rand(ROWS, CHUNK, 14)}
    noise, before = torch.randn(ROWS, CHUNK, 16), copy.deepcopy(batch)
    loss = SmolVLALoss(policy)(batch, noise, time)
    assert all(torch.equal(batch[key], before[key]) for key in before)
    torch.testing.assert_close(loss.detach(), lerobots(policy, batch, noise, time)[0])


@pytest.mark.parametrize("patches", [(4, 4), (3, 5), (7, 7), (6, 2)])
def test_patch_positions_equal_transformers(patches):
    vision = SmolVLMVisionConfig(hidden_size=2, image_size=56, patch_size=8, num_attention_heads=1)
    embeddings, recorded = SmolVLMVisionEmbeddings(vision), []
    embeddings.position_embedding.register_forward_pre_hook(lambda _, arguments: recorded.append(arguments[0]))
    rows, columns = patches
    embeddings(torch.zeros(1, 3, 8 * rows, 8 * columns), torch.ones(1, rows, columns, dtype=torch.bool))
    assert torch.equal(patch_places(rows, columns, 7, torch.device("cpu")), recorded[0][0])


@pytest.mark.parametrize("options", [{}, {"add_image_special_tokens": True, "empty_cameras": 1}])
def test_checked_attention_shapes_are_computed_shapes(backbone, monkeypatch, options):
    policy = make_policy(backbone, **options)
    choose_trainable(policy, "expert")
    loss, computed = SmolVLALoss(policy, attention="sdpa"), set()
    attention = torch.nn.functional.scaled_dot_product_attention

    def record_shapes(query, key, value, bias, **options):
        computed.add((query.shape[2], key.shape[2], bias.shape[2]))
        return attention(query, key, value, bias, **options)

    arguments = make_batch(policy)
    prefix = loss.prefix(loss.inputs(arguments[0]))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record_shapes)
    loss.velocity(*arguments[1:], prefix)
    shapes = {shape.name: shape for _, shape in loss.attentions(2, [12])}
    (heads,) = {layer.num_key_value_groups for layer, _ in loss.attentions(2, [12])}  # that share keys: more queries
    expected = [(heads * s.queries, s.keys, s.causal) for s in map(shapes.get, ("suffix", "cross"))]
    assert computed == {(queries, keys, queries if causal else 1) for queries, keys, causal in expected}
    assert shapes["state"].keys == shapes["prefix"].keys + 1 == prefix.bias.shape[3]
