"""SmolVLA's loss against LeRobot's own forward and plain autograd."""

import copy

import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionEmbeddings

from tests.policies.test_pi05 import gradient_errors, gradients, relative_error, to_float64
from tests.tiny_backbones import VOCABULARY, smolvlm
from vla_finetuning.policies.attention import Shape, what_is_wrong
from vla_finetuning.policies.compiling import Compiler
from vla_finetuning.policies.counting import flops_per_sample
from vla_finetuning.policies.families.smolvla import SmolVLALoss, patch_places
from vla_finetuning.policies.family import MEAN_COUNT
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.trainable import choose_trainable, leave_off_unused

CHUNK, WIDTH, STATE, ROWS = 5, 8, 4, 3
# What changes the order or the number of tokens and layers.
VARIANTS = {
    "plain": {},
    "marks": {"add_image_special_tokens": True, "empty_cameras": 1, "prefix_length": 64},
    "fewer expert layers": {"attention_mode": "self_attn", "num_expert_layers": 2},
    "cross alone": {"self_attn_every_n_layers": 0},
    "small images": {"resize_imgs_with_padding": (16, 16)},
    "vision trains": {"freeze_vision_encoder": False, "train_state_proj": False},
}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return smolvlm(tmp_path_factory.mktemp("smolvla"), layers=4)


def config_of(backbone, cameras=2, **options):
    images = {f"observation.images.{i}": PolicyFeature(FeatureType.VISUAL, (3, 32, 32)) for i in range(cameras)}
    return SmolVLAConfig(
        input_features={**images, "observation.state": PolicyFeature(FeatureType.STATE, (STATE,))},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (3,))},
        device="cpu",
        **{
            **{"chunk_size": CHUNK, "n_action_steps": CHUNK, "max_state_dim": 6, "max_action_dim": WIDTH},
            **{"resize_imgs_with_padding": (32, 32), "tokenizer_max_length": 12, "num_vlm_layers": 4},
            **backbone,
            **options,
        },
    )


def make_policy(backbone, **options):
    """All weights random: LeRobot starts some at zero or one, where a wrong gradient hides."""
    torch.manual_seed(0)
    policy = SmolVLAPolicy(config_of(backbone, **options))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.05)
    return policy


def make_batch(policy, missing=(), draws=1):
    generator = torch.Generator().manual_seed(1)
    batch = {
        key: torch.rand((ROWS, 3, 40, 48), generator=generator)
        for key in policy.config.image_features
        if key not in missing and "empty" not in key
    }
    batch["observation.language.tokens"] = torch.randint(0, VOCABULARY, (ROWS, 12), generator=generator)
    batch["observation.language.attention_mask"] = torch.arange(12)[None] < 3 * torch.arange(ROWS)[:, None] + 2
    batch["observation.state"] = torch.randn((ROWS, STATE), generator=generator)
    batch["action"] = torch.randn((ROWS, CHUNK, 3), generator=generator)
    batch["action_is_pad"] = torch.arange(CHUNK)[None] >= torch.tensor([CHUNK, 3, 1])[:, None]
    noise = torch.randn((ROWS * draws, CHUNK, WIDTH), generator=generator)
    return batch, noise, torch.rand(ROWS * draws, generator=generator) * 0.998 + 0.001


def lerobots(policy, batch, noise, time, reduction="mean"):
    """LeRobot's loss of a policy of equal weights, and that policy with its gradients."""
    policy = copy.deepcopy(policy)
    loss, _ = policy.forward(dict(batch), noise, time, reduction)
    loss.mean().backward()
    return loss.detach(), policy


@pytest.mark.parametrize(
    ("mode", "variant", "attention", "missing"),
    [
        *(("full", variant, "eager", ()) for variant in VARIANTS),
        ("full", "marks", "sdpa", ("observation.images.0",)),
        ("expert", "plain", "sdpa", ("observation.images.1",)),
        ("expert", "vision trains", "eager", ()),
        ("heads", "plain", "eager", ()),
        ("heads", "cross alone", "sdpa", ()),
    ],
)
def test_loss_and_every_gradient_are_lerobots(backbone, mode, variant, attention, missing, in_float64):
    policy = make_policy(backbone, **VARIANTS[variant]).double()
    arguments = to_float64(*make_batch(policy, missing))
    choose_trainable(policy, mode)
    expected, theirs = lerobots(policy, *arguments)
    loss = SmolVLALoss(policy, attention=attention)(*arguments)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-14)
    found, wanted = gradients(policy), gradients(theirs)
    assert found.keys() == wanted.keys() and None not in found.values()
    errors = gradient_errors(found, wanted)
    assert max(errors.values()) <= 1e-12, sorted(errors.items(), key=lambda item: -item[1])[:3]


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("heads", {"checkpointing": True}),
        ("expert", {"compile": Compiler("eager")}),
        ("full", {"checkpointing": True}),
        ("full", {"compile": Compiler("eager")}),
    ],
)
def test_in_float32_without_what_training_never_uses(backbone, mode, options):
    policy = make_policy(backbone)
    arguments = make_batch(policy)
    choose_trainable(policy, mode)
    expected, theirs = lerobots(policy, *arguments)
    leave_off_unused(policy)
    loss = SmolVLALoss(policy, attention="sdpa", **options)(*arguments)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    found, wanted = gradients(policy), gradients(theirs)
    assert found.keys() == wanted.keys()
    whole = [torch.cat([side[name].flatten() for name in found]) for side in (found, wanted)]
    assert relative_error(*whole) <= 2e-6
    assert not options.get("compile") or (options["compile"].calls and not options["compile"].failed)


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
def test_a_mode_trains_what_lerobots_options_do(backbone, mode, options):
    policy = SmolVLAPolicy(config_of(backbone, **options))
    theirs = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    choose_trainable(policy, mode)
    assert {name for name, parameter in policy.named_parameters() if parameter.requires_grad} == theirs


def test_losses_of_rows_are_lerobots(backbone):
    policy = make_policy(backbone)
    batch, noise, time = make_batch(policy)
    loss = SmolVLALoss(policy)
    expected, _ = lerobots(policy, batch, noise, time, "none")
    torch.testing.assert_close(loss(batch, noise, time, per_row=True), expected)
    weight = torch.tensor([0.5, 2.0, 0.1])
    torch.testing.assert_close(loss({**batch, "row_weight": weight}, noise, time), (expected * weight).mean())


def test_a_row_that_was_not_read_is_as_if_it_were_not_there(backbone):
    policy = make_policy(backbone)
    batch, noise, time = make_batch(policy)
    read = torch.tensor([True, False, True])
    expected, _ = lerobots(policy, {key: value[read] for key, value in batch.items()}, noise[read], time[read])
    batch["action"][1] = 1e6
    torch.testing.assert_close(SmolVLALoss(policy)({**batch, "is_read": read}, noise, time), expected)


def test_means_over_parts_of_a_step_are_lerobots_over_all_of_it(backbone):
    policy, draws = make_policy(backbone), 2
    batch, noise, time = make_batch(policy, draws=draws)
    expected = sum(lerobots(policy, batch, noise[draw::draws], time[draw::draws])[0] for draw in range(draws)) / draws
    loss, found = SmolVLALoss(policy), []
    for rows in (slice(0, 1), slice(1, 3)):
        part = {key: value[rows] for key, value in batch.items()}
        part[MEAN_COUNT] = loss.count(batch) / 2
        of_draws = slice(rows.start * draws, rows.stop * draws)
        found.append(loss(part, noise[of_draws], time[of_draws]))
    torch.testing.assert_close(sum(found) / 2, expected)


def test_several_draws_are_the_mean_of_lerobots_losses(backbone):
    policy, draws = make_policy(backbone), 3
    batch, noise, time = make_batch(policy, draws=draws)
    expected = [lerobots(policy, batch, noise[draw::draws], time[draw::draws])[0] for draw in range(draws)]
    torch.testing.assert_close(SmolVLALoss(policy)(batch, noise, time), torch.stack(expected).mean())


def test_the_space_of_aloha_is_lerobots_and_leaves_the_batch_alone(backbone):
    policy = make_policy(backbone, adapt_to_pi_aloha=True, max_state_dim=16, max_action_dim=16)
    policy.config.output_features["action"] = PolicyFeature(FeatureType.ACTION, (14,))
    batch, _, time = make_batch(policy)
    batch |= {"observation.state": torch.rand(ROWS, 14), "action": torch.rand(ROWS, CHUNK, 14)}
    noise, before = torch.randn(ROWS, CHUNK, 16), copy.deepcopy(batch)
    loss = SmolVLALoss(policy)(batch, noise, time)
    assert all(torch.equal(batch[key], before[key]) for key in before)
    torch.testing.assert_close(loss.detach(), lerobots(policy, batch, noise, time)[0])


def test_images_and_words_run_without_autograd_and_the_state_with(backbone, monkeypatch):
    policy = make_policy(backbone)
    choose_trainable(policy, "heads")
    loss, grad = SmolVLALoss(policy), {}
    for name in ("_vision_layer", "_prefix_layer", "_state_layer"):
        function = getattr(loss, name)

        def noted(*arguments, name=name, function=function):
            result = function(*arguments)
            grad.setdefault(name, set()).add((result if name == "_vision_layer" else result[0]).requires_grad)
            return result

        monkeypatch.setattr(loss, name, noted)
    loss.prefix(make_batch(policy)[0])
    assert grad == {"_vision_layer": {False}, "_prefix_layer": {False}, "_state_layer": {True}}


@pytest.mark.parametrize("patches", [(4, 4), (3, 5), (7, 7), (6, 2)])
def test_patches_have_the_places_that_transformers_gives_them(patches):
    vision = SmolVLMVisionConfig(hidden_size=2, image_size=56, patch_size=8, num_attention_heads=1)
    embeddings, found = SmolVLMVisionEmbeddings(vision), []
    embeddings.position_embedding.register_forward_pre_hook(lambda _, arguments: found.append(arguments[0]))
    rows, columns = patches
    embeddings(torch.zeros(1, 3, 8 * rows, 8 * columns), torch.ones(1, rows, columns, dtype=torch.bool))
    assert torch.equal(patch_places(rows, columns, 7, torch.device("cpu")), found[0][0])


def test_a_kernel_that_ignores_what_comes_later_is_wrong(backbone, monkeypatch):
    layer = make_policy(backbone).model.vlm_with_expert.lm_expert.layers[0].self_attn
    shapes = [(layer, Shape("suffix", 5, 4, 12, 6, True, causal=True))]
    assert what_is_wrong("sdpa", shapes, torch.device("cpu"), torch.float32) is None
    attention = torch.nn.functional.scaled_dot_product_attention

    def sees_all(query, key, value, bias, **options):
        return attention(query, key, value, bias[:, :, -1:], **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sees_all)
    assert "wrong result" in what_is_wrong("sdpa", shapes, torch.device("cpu"), torch.float32)


def test_shapes_that_are_checked_are_those_that_are_computed(backbone, monkeypatch):
    policy = make_policy(backbone)
    choose_trainable(policy, "expert")
    loss, seen = SmolVLALoss(policy, attention="sdpa"), set()
    attention = torch.nn.functional.scaled_dot_product_attention

    def noted(query, key, value, bias, **options):
        seen.add((query.shape[2], key.shape[2], bias.shape[2]))
        return attention(query, key, value, bias, **options)

    arguments = make_batch(policy)
    prefix = loss.prefix(loss.inputs(arguments[0]))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    loss.velocity(*arguments[1:], prefix)
    shapes = {shape.part: shape for _, shape in loss.attentions(2, [12])}
    (heads,) = {layer.num_key_value_groups for layer, _ in loss.attentions(2, [12])}  # that share keys: more queries
    expected = [(heads * s.queries, s.keys, s.causal) for s in map(shapes.get, ("suffix", "cross"))]
    assert seen == {(queries, keys, queries if causal else 1) for queries, keys, causal in expected}
    assert shapes["state"].keys == shapes["prefix"].keys + 1 == prefix.bias.shape[3]


def test_work_of_the_real_policy_is_counted(backbone, tmp_path):
    """Sizes of SmolVLM2-500M: of a row, 646 GFLOP in the vision tower at 512 x 512 and 110 in language and expert."""
    real = smolvlm(
        tmp_path,
        text={"hidden_size": 960, "intermediate_size": 2560, "num_attention_heads": 15, "num_key_value_heads": 5}
        | {"head_dim": 64, "num_hidden_layers": 16},
        vision={"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
        | {"image_size": 512, "patch_size": 16},
        scale_factor=4,
    )
    options = {"resize_imgs_with_padding": (512, 512), "chunk_size": 50, "n_action_steps": 50, "num_vlm_layers": 16}
    options |= {"tokenizer_max_length": 48, "max_state_dim": 32, "max_action_dim": 32}
    config = config_of(real, 3, **options)
    assert family_of(config).tokens(config, 3) == 3 * 64 + 48 + 1 + 50
    assert flops_per_sample(config, 3, "expert") == pytest.approx(756e9, rel=0.05)
    assert flops_per_sample(config, 3, "expert", features=True) == pytest.approx(110e9, rel=0.05)
    # In bfloat16 123 kB, where the frame at 512 x 512 takes 786.
    assert family_of(config).feature_shapes(config) == dict.fromkeys(config.image_features, (64, 960))
