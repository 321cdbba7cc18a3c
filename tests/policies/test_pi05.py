"""The loss against LeRobot's own forward and plain autograd."""

import copy
from collections import Counter

import numpy as np
import pytest
import torch
from lerobot.policies.common.flow_matching import sample_time_beta
from lerobot.policies.pi_gemma import PiGemmaRMSNorm
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.tiny import ACTION_DIM, act_config, make_batch, make_config, make_policy, real_config, reference
from vla_finetuning.policies.counting import flops_per_sample
from vla_finetuning.policies.families.pi05 import PI05Loss
from vla_finetuning.policies.family import PolicyLoss
from vla_finetuning.policies.flow import continue_chunk, sample_noise_and_time
from vla_finetuning.policies.meta import meta_policy
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.trainable import choose_trainable

MODES = ("heads", "expert", "full")
# Attention does not change when a vector is added to all its keys, so the true gradient of this bias is zero.
KEY_BIAS = "k_proj.bias"


def gradients(policy):
    return {name: p.grad for name, p in policy.named_parameters() if p.requires_grad}


def relative_error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def gradient_errors(found, expected):
    """Relative error of each gradient; of those that are zero but for rounding, relative to their layer's weights."""
    scales = {name: expected[name.replace(KEY_BIAS, "k_proj.weight")].norm() for name in expected}
    return {name: ((found[name] - expected[name]).norm() / scales[name]).item() for name in expected}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


# --- equality with LeRobot --------------------------------------------------------------------------------


MISSING = ("observation.images.1",)


def loss_and_gradients(policy, mode, batch, noise, time, **options):
    """Ours, and LeRobot's forward with plain autograd."""
    choose_trainable(policy, mode)
    theirs = reference(policy, noise, time)
    expected, _ = theirs.forward(batch)
    expected.backward()
    loss = PI05Loss(policy, **options)(batch, noise, time)
    loss.backward()
    return loss, gradients(policy), expected, gradients(theirs)


def to_float64(batch, noise, time):
    batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    return batch, noise.double(), time.double()


@pytest.mark.parametrize(
    "mode, attention, cameras, missing, padded_language",
    [
        ("heads", "eager", 1, (), True),
        ("heads", "sdpa", 2, (), True),
        ("expert", "eager", 2, (), False),
        ("expert", "sdpa", 3, MISSING, True),
        ("full", "eager", 3, (), True),
        ("full", "eager", 3, MISSING, False),
        ("full", "sdpa", 1, (), False),
        ("full", "sdpa", 3, MISSING, True),
    ],
)
def test_loss_and_every_gradient_are_lerobots(mode, attention, cameras, missing, padded_language, in_float64):
    policy = make_policy(cameras).double()
    arguments = to_float64(*make_batch(policy, padded_language=padded_language, missing=missing))
    loss, found, expected, wanted = loss_and_gradients(policy, mode, *arguments, attention=attention)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-14)
    assert found.keys() == wanted.keys()
    errors = gradient_errors(found, wanted)
    assert max(errors.values()) <= 1e-12, sorted(errors.items(), key=lambda item: -item[1])[:3]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_loss_and_gradient_are_lerobots_in_float32(mode, attention):
    policy = make_policy(2)
    loss, found, expected, wanted = loss_and_gradients(policy, mode, *make_batch(policy), attention=attention)
    assert loss.shape == () and loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    whole = [torch.cat([gradient.flatten() for gradient in side.values()]) for side in (found, wanted)]
    assert relative_error(*whole) <= 1e-6


def test_fused_attention_in_bfloat16_is_no_further_from_float32(monkeypatch):
    """Over several batches: LeRobot's attention rounds the scores to bfloat16, the fused one does not."""
    policy = make_policy(2)
    choose_trainable(policy, "full")
    errors = {}
    for attention in ("eager", "sdpa"):
        errors[attention] = 0.0
        for seed in range(4):
            arguments, found = make_batch(policy, 8, seed=seed), []
            for bf16 in (True, False):
                policy.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    loss = PI05Loss(policy, attention=attention)(*arguments)
                loss.backward()
                found.append(torch.cat([gradient.flatten() for gradient in gradients(policy).values()]))
            errors[attention] += relative_error(*found) / 4
    assert errors["sdpa"] <= 1.05 * errors["eager"] < 0.1


@pytest.mark.parametrize("rows, draws", [(1, 1), (1, 2), (4, 1)])
def test_fused_attention_gets_keys_and_values_in_memory_of_their_own(monkeypatch, rows, draws):
    """A dimension without a stride is the same memory over and over, which a kernel may get wrong."""
    fused, strides = torch.nn.functional.scaled_dot_product_attention, []

    def watched(query, key, value, *args, **options):
        strides.extend(stride for heads in (key, value) for stride in heads.stride())
        return fused(query, key, value, *args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    policy = make_policy(2)
    assert policy.model.paligemma_with_expert.gemma_expert.config.num_key_value_heads == 1
    batch, _, _ = make_batch(policy, rows)
    noise, time = sample_noise_and_time(policy.config, rows * draws, 0, 0, "cpu")
    PI05Loss(policy, attention="sdpa")(batch, noise, time)
    assert strides and 0 not in strides


def test_fused_attention_stores_no_attention_weights():
    policy = make_policy(1)
    choose_trainable(policy, "full")
    batch, noise, time = make_batch(policy)
    tokens = batch["observation.language.tokens"].shape[1] + 4  # the camera's 28 x 28 pixels are 4 patches

    def weights(attention):
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)), lambda t: t):
            PI05Loss(policy, attention=attention)(batch, noise, time)
        return [shape for shape in shapes if shape[-2:] == (tokens, tokens)]

    assert weights("eager") and not weights("sdpa")


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_of_several_draws_is_the_mean_of_lerobots_losses(mode):
    draws = 3
    policy = make_policy(2)
    choose_trainable(policy, mode)
    batch, _, _ = make_batch(policy)
    noise, time = sample_noise_and_time(policy.config, 4 * draws, 0, 0, "cpu")
    calls = []
    key = policy.model.paligemma_with_expert.paligemma.model.language_model.layers[0].self_attn.k_proj
    hook = key.register_forward_hook(lambda *_: calls.append(1))
    loss = PI05Loss(policy)(batch, noise, time)
    loss.backward()
    assert len(calls) == 1  # images and language once for all draws
    hook.remove()
    losses, wanted = [], {}
    for draw in range(draws):
        theirs = reference(policy, noise[draw::draws], time[draw::draws])
        theirs.zero_grad()
        expected, _ = theirs.forward(batch)
        expected.backward()
        losses.append(expected.item())
        for name, gradient in gradients(theirs).items():
            wanted[name] = wanted.get(name, 0) + gradient / draws
    assert loss.item() == pytest.approx(np.mean(losses), rel=1e-6)
    assert len(set(losses)) == draws
    whole = [torch.cat([g.flatten() for g in side.values()]) for side in (gradients(policy), wanted)]
    assert relative_error(*whole) <= 1e-6


def with_given_actions(policy, number, monkeypatch):
    """A copy of LeRobot's policy whose expert sees the first actions at time 0: its own norm, a position at a time."""
    theirs, norm = copy.deepcopy(policy), PiGemmaRMSNorm.forward
    embed, denoise = theirs.model.embed_suffix, theirs.model.denoise_step

    def embed_suffix(noisy_actions, time):
        *tokens, condition = embed(noisy_actions, time)
        _, _, _, clean = embed(noisy_actions, torch.zeros_like(time))
        return *tokens, torch.stack([clean if t < number else condition for t in range(noisy_actions.shape[1])], dim=1)

    def norm_positions(module, hidden, cond=None):
        if cond is None or cond.ndim == 2:
            return norm(module, hidden, cond)
        positions = [norm(module, hidden[:, [t]], cond[:, t]) for t in range(hidden.shape[1])]
        return tuple(torch.cat(part, dim=1) for part in zip(*positions, strict=True))

    def denoise_step(**inputs):
        velocity = denoise(**inputs)
        velocity[:, :number] = 0
        return velocity

    monkeypatch.setattr(PiGemmaRMSNorm, "forward", norm_positions)
    theirs.model.embed_suffix, theirs.model.denoise_step = embed_suffix, denoise_step
    return theirs


@pytest.mark.parametrize("mode, attention", [("expert", "eager"), ("full", "sdpa")])
def test_loss_and_gradients_of_chunks_with_given_actions_are_of_a_plain_loop(mode, attention, in_float64, monkeypatch):
    draws, rows = 2, 4
    policy = make_policy(2).double()
    policy.config.rtc_training_max_delay = 4
    choose_trainable(policy, mode)
    noise, time = sample_noise_and_time(policy.config, rows * draws, 0, 0, "cpu")
    batch, noise, time = to_float64(make_batch(policy)[0], noise, time)
    loss = PI05Loss(policy, attention=attention, checkpointing=mode == "full")
    whole = loss(batch, noise, time)
    whole.backward()
    half, half_draws = rows // 2, rows // 2 * draws
    parts = [
        loss({k: v[i * half :][:half] for k, v in batch.items()}, noise[i * half_draws :][:half_draws],
             time[i * half_draws :][:half_draws], per_row=True).mean().item()
        for i in range(2)
    ]  # fmt: skip
    assert whole.item() == pytest.approx(np.mean(parts), rel=1e-13) and parts[0] != parts[1]

    delays = [int((row[:, 0] == 0).sum()) for row in time]
    assert len(set(delays)) > 2
    total, wanted = 0.0, {}
    for number, delay in enumerate(delays):
        row = {key: value[[number // draws]] for key, value in batch.items()}
        with monkeypatch.context() as patch:
            theirs = with_given_actions(policy, delay, patch)
            theirs.zero_grad()
            actions, from_noise = theirs.prepare_action(row), noise[[number]].clone()
            from_noise[:, :delay] = actions[:, :delay]  # noisy actions are then these, at any time
            images, masks = theirs._preprocess_images(row)
            tokens, mask = row["observation.language.tokens"], row["observation.language.attention_mask"]
            losses = theirs.model.forward(images, masks, tokens, mask, actions, from_noise, time[[number], -1, 0])
            loss = losses[:, delay:, :ACTION_DIM].sum()
            loss.backward()
        total += loss.item()
        for name, gradient in gradients(theirs).items():
            wanted[name] = wanted.get(name, 0) + gradient
    count = sum(policy.config.chunk_size - delay for delay in delays) * ACTION_DIM
    assert whole.item() == pytest.approx(total / count, rel=1e-12)
    errors = gradient_errors(gradients(policy), {name: gradient / count for name, gradient in wanted.items()})
    assert max(errors.values()) <= 1e-9, sorted(errors.items(), key=lambda item: -item[1])[:3]


def test_how_many_actions_are_given_is_drawn_after_noise_and_time():
    config, rows = make_config(1), 4000
    noise, time = sample_noise_and_time(config, rows, 7, 3, "cpu")
    config.rtc_training_max_delay = 3
    same_noise, drawn = sample_noise_and_time(config, rows, 7, 3, "cpu")
    times, weight = drawn.unbind(-1)
    assert torch.equal(noise, same_noise)
    delays = (weight == 0).sum(dim=1)
    given = torch.arange(config.chunk_size) < delays[:, None]
    assert torch.equal(times, torch.where(given, 0.0, time[:, None]))
    assert torch.bincount(delays).tolist() == pytest.approx([rows / 4] * 4, rel=0.15)
    torch.testing.assert_close(weight, ~given / (~given).float().mean())


@pytest.mark.parametrize("delay", [0, 1, 4])
def test_a_chunk_goes_on_from_given_actions_as_by_lerobots_sampler(delay, monkeypatch):
    policy = make_policy(2).eval()
    batch, noise, _ = make_batch(policy)
    prefix = torch.randn(4, delay, ACTION_DIM, generator=torch.Generator().manual_seed(1))
    found = continue_chunk(PI05Loss(policy), batch, noise, prefix)
    assert torch.equal(found[:, :delay], prefix)
    theirs, start = with_given_actions(policy, delay, monkeypatch), noise.clone()
    start[:, :delay] = theirs.prepare_action({"action": prefix})
    expected = theirs.predict_action_chunk(batch, noise=start)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    if delay == 0:
        assert torch.equal(found, continue_chunk(PI05Loss(policy), batch, noise))
    else:
        plain = policy.predict_action_chunk(batch, noise=start)
        assert (found - plain)[:, delay:].abs().max() > 1e-3


def test_several_draws_leave_padded_steps_out_as_one_does():
    policy = make_policy(1)
    batch, _, _ = make_batch(policy)
    noise, time = sample_noise_and_time(policy.config, 8, 0, 0, "cpu")
    module = PI05Loss(policy, mask_padding=True)
    one_by_one = [module(batch, noise[draw::2], time[draw::2]).item() for draw in range(2)]
    assert module(batch, noise, time).item() == pytest.approx(np.mean(one_by_one), rel=1e-6)
    with pytest.raises(ValueError, match="7 draws of noise and time for 4 rows"):
        module(batch, noise[:7], time[:7])


def test_uint8_images_are_what_lerobot_makes_of_them():
    policy = make_policy(2)
    batch, noise, time = make_batch(policy)
    bytes_ = {key: (value * 255).to(torch.uint8) for key, value in batch.items() if "images" in key}
    expected, _ = reference(policy, noise, time).forward(
        {**batch, **{key: value.to(torch.float32) / 255 for key, value in bytes_.items()}}
    )
    channels_last = {key: value.movedim(1, -1).contiguous() for key, value in bytes_.items()}
    loss = PI05Loss(policy)({**batch, **channels_last}, noise, time)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_ten_steps_with_accumulation_follow_lerobots(mode, in_float64):
    """Losses and final weights of a plain loop over LeRobot's forward.

    In float32 the losses agree to 1e-6 as well, but Adam makes whole steps of gradients that are rounding noise.
    """
    ours = make_policy(2).double()
    choose_trainable(ours, mode)
    theirs = copy.deepcopy(ours)
    loss_module = PI05Loss(ours)

    def optimizer(policy):
        return torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-4, weight_decay=0.01)

    def train(policy, compute):
        stepper, losses = optimizer(policy), []
        for step in range(10):
            for micro in range(2):
                loss = compute(*to_float64(*make_batch(policy, seed=2 * step + micro)))
                (loss / 2).backward()
                losses.append(loss.item())
            torch.nn.utils.clip_grad_norm_(stepper.param_groups[0]["params"], 1.0)
            stepper.step()
            stepper.zero_grad()
        return losses

    def lerobots(batch, noise, time):
        theirs.model.sample_noise = lambda shape, device: noise
        theirs.model.sample_time = lambda rows, device: time
        return theirs.forward(batch)[0]

    start = copy.deepcopy(ours.state_dict())
    np.testing.assert_allclose(train(ours, loss_module), train(theirs, lerobots), rtol=1e-12)
    for (name, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert relative_error(found, expected) <= 1e-12, name
        assert torch.equal(found, start[name]) is not found.requires_grad, name


def test_bfloat16_policy_is_lerobots_to_its_precision():
    policy = make_policy(2, dtype="bfloat16")
    batch, noise, time = make_batch(policy)
    expected, _ = reference(policy, noise, time).forward(batch)
    loss = PI05Loss(policy)(batch, noise, time)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)


@pytest.mark.parametrize("mode", ["expert", "full"])
@pytest.mark.parametrize("asked_by", ["us", "the policy"])
def test_checkpointing_changes_nothing_but_memory(mode, asked_by):
    policy = make_policy(2, gradient_checkpointing=asked_by == "the policy")
    choose_trainable(policy, mode)
    batch, noise, time = make_batch(policy)
    vlm = policy.model.paligemma_with_expert
    layers = [
        *vlm.paligemma.model.vision_tower.vision_model.encoder.layers,
        *vlm.paligemma.model.language_model.layers[:-1],
        *vlm.gemma_expert.model.layers,
    ]

    def run(module):
        policy.zero_grad()
        saved, calls = 0, Counter()

        def count(tensor):
            nonlocal saved
            saved += tensor.numel()
            return tensor

        hooks = [
            projection.register_forward_pre_hook(lambda *_, number=number: calls.update([number]))
            for number, layer in enumerate(layers)
            for name, projection in layer.self_attn.named_children()
            if name in ("o_proj", "out_proj")
        ]
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = module(batch, noise, time)
        loss.backward()
        for hook in hooks:
            hook.remove()
        return loss.item(), copy.deepcopy(gradients(policy)), saved, calls

    checkpointed = run(PI05Loss(policy, checkpointing=asked_by == "us"))
    policy.config.gradient_checkpointing = False
    plain = run(PI05Loss(policy))
    assert checkpointed[0] == plain[0]
    for name, expected in plain[1].items():
        assert torch.equal(checkpointed[1][name], expected), name
    assert checkpointed[2] < plain[2] / 2
    assert set(plain[3].values()) == {1}
    # What trains is computed twice: not more often, as checkpoints within checkpoints would.
    again = {number for number, times in checkpointed[3].items() if times == 2}
    assert set(checkpointed[3].values()) <= {1, 2}
    assert again == set(range(len(layers)) if mode == "full" else range(len(layers) - 3, len(layers)))


def test_masked_padding_leaves_padded_steps_out():
    policy = make_policy(1)
    batch, noise, time = make_batch(policy)
    theirs = reference(policy, noise, time)
    images, image_masks = theirs._preprocess_images(batch)
    language = batch["observation.language.tokens"], batch["observation.language.attention_mask"]
    losses = theirs.model.forward(images, image_masks, *language, theirs.prepare_action(batch), noise, time)
    losses = losses[:, :, :ACTION_DIM]
    expected = torch.where(batch["action_is_pad"][:, :, None], 0.0, losses).sum() / losses.numel()

    masked = PI05Loss(policy, mask_padding=True)
    assert masked(batch, noise, time).item() == pytest.approx(expected.item(), rel=1e-6)
    assert PI05Loss(policy)(batch, noise, time).item() == pytest.approx(losses.mean().item(), rel=1e-6)
    # Rows differ in padding; still the whole is the mean of its halves.
    halves = [
        masked({key: value[rows] for key, value in batch.items()}, noise[rows], time[rows]).item()
        for rows in (slice(0, 2), slice(2, 4))
    ]
    assert np.mean(halves) == pytest.approx(expected.item(), rel=1e-6)


def test_other_policies_use_their_own_forward():
    from lerobot.policies.act.modeling_act import ACTPolicy

    from vla_finetuning.policies.processors import DeviceHalf

    config = act_config(make_config(1).input_features, chunk_size=4, n_action_steps=4, use_vae=False, dropout=0.0)
    policy = ACTPolicy(config)
    batch = {
        "observation.images.0": torch.rand(2, 3, 64, 64),
        "observation.state": torch.rand(2, 4),
        "action": torch.rand(2, 4, 3),
        "action_is_pad": torch.zeros(2, 4, dtype=torch.bool),
    }
    family = family_of(config)
    assert family.draw(config, 2, 0, 0, "cpu") == (None, None)
    loss = family.make_loss(policy, images=DeviceHalf(None, config))(batch)
    assert torch.equal(loss, policy.forward(batch)[0])
    with pytest.raises(ValueError, match="normalises images"):
        PolicyLoss(policy)
    report = choose_trainable(policy, "full")
    assert report.total == report.trainable == sum(p.numel() for p in policy.parameters())
    with pytest.raises(ValueError, match="type 'act'"):
        choose_trainable(policy, "expert")
    with pytest.raises(ValueError, match="LeRobot's own loss of a 'act' has no mask_padding"):
        family.make_loss(policy, images=DeviceHalf(None, config), mask_padding=True)
    assert flops_per_sample(policy, 1, "full") is None


# --- what is computed -------------------------------------------------------------------------------------


def test_projections_of_actions_and_time_are_float32_under_autocast():
    policy, seen = make_policy(1), {}
    core = policy.model
    for name in ("action_in_proj", "action_out_proj", "time_mlp_in", "time_mlp_out"):
        module = getattr(core, name)
        module.register_forward_hook(lambda module, args, out, name=name: seen.update({name: (module, args[0], out)}))
    with torch.autocast("cpu", torch.bfloat16):
        PI05Loss(policy)(*make_batch(policy))
    assert len(seen) == 4
    for module, given, made in seen.values():
        assert torch.equal(made, torch.nn.functional.linear(given.float(), module.weight, module.bias))


@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_prefix_runs_without_autograd(mode, monkeypatch):
    policy = make_policy(2)
    choose_trainable(policy, mode)
    vlm = policy.model.paligemma_with_expert
    tracked, calls = [], []

    def watch(module, arguments, output):
        tracked.append(output.requires_grad)
        calls.append(module)

    for layer in vlm.paligemma.model.language_model.layers:
        layer.self_attn.k_proj.register_forward_hook(watch)
    PI05Loss(policy)(*make_batch(policy)).backward()
    assert tracked == [mode == "full"] * 3


def test_the_last_layers_unused_half_is_not_computed():
    policy = make_policy(1)
    last = policy.model.paligemma_with_expert.paligemma.model.language_model.layers[-1]

    def fail(module, arguments):
        raise AssertionError("computed, and used by nothing")

    for module in (last.self_attn.q_proj, last.self_attn.o_proj, last.mlp, last.post_attention_layernorm):
        module.register_forward_pre_hook(fail)
    PI05Loss(policy)(*make_batch(policy))


def test_patches_stay_in_the_order_of_their_memory():
    """Through all of the vision tower, forward and backward; transformers' own hands on transposed ones."""
    policy, entered = make_policy(1), []
    choose_trainable(policy, "full")
    tower = policy.model.paligemma_with_expert.paligemma.model.vision_tower.vision_model

    def note(module, arguments):
        entered.append(arguments[0])
        arguments[0].register_hook(lambda gradient: entered.append(gradient))

    for layer in tower.encoder.layers:
        for module in (layer.layer_norm1, layer.layer_norm2):
            module.register_forward_pre_hook(note)
    PI05Loss(policy)(*make_batch(policy)).backward()
    assert len(entered) == 2 * 2 * len(tower.encoder.layers)
    assert all(tensor.is_contiguous() for tensor in entered)
    entered.clear()
    policy.forward(make_batch(policy)[0])
    assert not any(tensor.is_contiguous() for tensor in entered)


# --- rotary angles ------------------------------------------------------------------------------------------


class OuterProducts(TorchDispatchMode):
    """Counts matrix products over a dimension of one: what angles are, as a product of positions and frequencies."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.count += arguments[0].shape[-1] == 1
        return function(*arguments, **(options or {}))


def rotary_of(loss):
    return loss.policy.model.paligemma_with_expert.paligemma.model.language_model.rotary_emb


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_gemmas_and_no_product_of_matrices(dtype):
    loss, positions = PI05Loss(make_policy(1)), torch.arange(968)[None].expand(2, -1)
    with OuterProducts() as ours:
        found = loss._rotation(torch.empty(0, dtype=dtype), positions)
    with OuterProducts() as gemmas:
        expected = rotary_of(loss)(torch.empty(0, dtype=dtype), positions)
    assert (ours.count, gemmas.count) == (0, 1)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == dtype and torch.equal(mine, theirs.unsqueeze(1))


def test_no_angle_of_a_step_is_a_product_of_matrices():
    policy = make_policy(1)
    with OuterProducts() as ours:
        PI05Loss(policy)(*make_batch(policy)).backward()
    with OuterProducts() as lerobots:
        policy.forward(make_batch(policy)[0])
    assert ours.count == 0 < lerobots.count


@pytest.mark.gpu
def test_angles_at_far_positions_are_exact_whatever_matrix_products_are():
    loss, before = PI05Loss(make_policy(1, head_dim=256)).cuda(), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        found = loss._rotation(torch.empty(0, device="cuda"), torch.tensor([[900]], device="cuda"))
    finally:
        torch.set_float32_matmul_precision(before)
    angles = 900 * rotary_of(loss).inv_freq.double().cpu()
    for mine, exact in zip(found, (angles.cos(), angles.sin()), strict=True):
        assert (mine.double().cpu().flatten() - exact.repeat(2)).abs().max() < 1e-4


class ListSyncs(TorchDispatchMode):
    """Notes every operation that would make the host wait for a CUDA device, or copy to or from one."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        on_device = any(tensor.device.type == "cuda" for tensor in tensors)
        name = function.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero") and on_device:
            self.found.append(name)
        if name == "_local_scalar_dense":
            return 1.0
        result = function(*arguments, **options)
        if name in ("_to_copy", "copy_") and isinstance(result, torch.Tensor):
            devices = {tensor.device.type for tensor in [*tensors, result]}
            if len(devices) > 1:
                self.found.append(f"{name} {sorted(devices)}")
        return result


def to_fake_cuda(module):
    """Give a module parameters and buffers on a CUDA device that need not exist; call under a FakeTensorMode."""
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                fake = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda")
                child._parameters[name] = torch.nn.Parameter(fake, requires_grad=parameter.requires_grad)
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda")


@pytest.mark.parametrize("mode", MODES)
def test_forward_neither_waits_nor_copies(mode):
    policy = make_policy(2)
    choose_trainable(policy, mode)
    loss = PI05Loss(policy, mask_padding=True)
    batch, _, _ = make_batch(policy)
    with FakeTensorMode(allow_non_fake_inputs=True):
        to_fake_cuda(loss)
        on_device = {key: torch.empty(value.shape, dtype=value.dtype, device="cuda") for key, value in batch.items()}
        on_device["observation.images.0"] = torch.empty((4, 28, 28, 3), dtype=torch.uint8, device="cuda")
        noise, time = torch.empty(4, 6, 32, device="cuda"), torch.empty(4, device="cuda")
        with ListSyncs() as ours:
            result = loss(on_device, noise, time)
        assert result.device.type == "cuda"
        del on_device["observation.images.0"]
        # The positive control: LeRobot's own forward copies its times and two masks, then reads its losses as numpy,
        # which is where a fake tensor gives up.
        with ListSyncs() as theirs, pytest.raises(RuntimeError, match="numpy"):
            policy.forward(on_device)
        with ListSyncs() as planted:
            result.item()
    assert ours.found == []
    assert theirs.found == ["_to_copy ['cpu', 'cuda']"] * 4
    assert planted.found == ["_local_scalar_dense"]


def test_flops_are_counted_and_less_than_lerobots():
    policy = make_policy(3)

    def lerobots(mode):
        counted = meta_policy(policy.config)
        choose_trainable(counted, mode)
        with torch.device("meta"):
            batch = {key: torch.empty(1, *f.shape) for key, f in counted.config.image_features.items()}
            tokens = (1, counted.config.tokenizer_max_length)
            images, masks = counted._preprocess_images(batch)
            tokens, language_mask = torch.empty(tokens, dtype=torch.int64), torch.empty(tokens, dtype=torch.bool)
            actions = torch.empty(1, 6, 32)
            with FlopCounterMode(display=False) as counter:
                losses = counted.model.forward(images, masks, tokens, language_mask, actions, actions, torch.empty(1))
                losses.mean().backward()
        return counter.get_total_flops()

    ours = {mode: flops_per_sample(policy, 3, mode) for mode in MODES}
    assert 0 < ours["heads"] < ours["expert"] < 0.7 * lerobots("expert")
    assert ours["expert"] < 0.5 * ours["full"] < ours["full"] < lerobots("full")
    one, two, three = (flops_per_sample(policy, 3, "expert", draws) for draws in (1, 2, 3))
    assert one < two < 1.5 * one and three - two == two - one  # the prefix is counted once
    assert flops_per_sample(policy, 1, "full") < flops_per_sample(policy.config, 3, "full") == ours["full"]


@pytest.mark.parametrize("cameras", [1, 3])
def test_tokens_are_those_of_lerobots_sequence(cameras):
    policy = make_policy(cameras)
    batch, noise, time = make_batch(policy)
    lengths = []
    theirs = reference(policy, noise, time)
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
    assert family.tokens(real_config(), 3) == 3 * 256 + 200 + 50


def test_flops_of_the_real_policy():
    """4.14 B parameters, 3 cameras, 200 tokens, chunks of 50; LeRobot's plain autograd takes 8.64 T in this mode."""
    assert flops_per_sample(real_config(), 3, "expert") / 1e12 == pytest.approx(4.53, rel=0.01)


# --- noise and time ---------------------------------------------------------------------------------------


def test_draws_depend_on_seed_and_step_only():
    config = make_config(1)
    noise, time = sample_noise_and_time(config, 8, 7, 3, "cpu")
    assert noise.shape == (8, 6, 32) and time.shape == (8,)
    assert noise.dtype == time.dtype == torch.float32
    torch.manual_seed(1)
    state = torch.get_rng_state()
    again = sample_noise_and_time(config, 8, 7, 3, "cpu")
    assert torch.equal(again[0], noise) and torch.equal(again[1], time)
    assert torch.equal(torch.get_rng_state(), state)
    for seed, step in ((8, 3), (7, 4), (3, 7)):
        other = sample_noise_and_time(config, 8, seed, step, "cpu")
        assert not torch.equal(other[0], noise) and not torch.equal(other[1], time)


@pytest.mark.parametrize("alpha, beta", [(1.5, 1.0), (1.0, 1.0), (2.0, 3.0)])
def test_time_has_lerobots_distribution(alpha, beta):
    config = make_config(1, chunk_size=1, max_action_dim=4)
    config.time_sampling_beta_alpha, config.time_sampling_beta_beta = alpha, beta
    rows = 20_000
    torch.manual_seed(0)
    options = {"scale": config.time_sampling_scale, "offset": config.time_sampling_offset}
    expected = np.sort(sample_time_beta(rows, "cpu", alpha=alpha, beta=beta, **options).numpy())
    found = np.sort(sample_noise_and_time(config, rows, 0, 0, "cpu")[1].numpy())
    # Kolmogorov and Smirnov's distance of two samples; equal distributions stay below in 99.9 % of cases.
    everything = np.concatenate([expected, found])
    below = [np.searchsorted(sample, everything, side="right") / rows for sample in (expected, found)]
    assert np.abs(below[0] - below[1]).max() < 1.95 * np.sqrt(2 / rows)
    assert found.min() >= 0.001 and found.max() <= 1.0


def test_noise_is_standard_normal():
    noise, _ = sample_noise_and_time(make_config(1), 1000, 0, 0, "cpu")
    assert noise.mean().item() == pytest.approx(0, abs=0.01)
    assert noise.std().item() == pytest.approx(1, abs=0.01)


# --- bad input --------------------------------------------------------------------------------------------


def test_a_good_batch_passes():
    policy = make_policy(2)
    batch, _, _ = make_batch(policy)
    family_of(policy.config).check_batch(batch, policy.config)
    image = (batch["observation.images.0"].movedim(1, -1) * 255).to(torch.uint8)
    family_of(policy.config).check_batch({**batch, "observation.images.0": image}, policy.config)
    del batch["observation.images.1"]
    family_of(policy.config).check_batch(batch, policy.config)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"action": torch.zeros(4, 3)}, r"a chunk of actions is \(4,\), expected \(4, 6\), and its dimensions"),
        ({"action": torch.zeros(4, 1, 3)}, r"\(4, 1\), expected \(4, 6\)"),
        ({"observation.images.0": None, "observation.images.1": None}, r"none of the policy's cameras"),
    ],
)
def test_check_batch_names_what_does_not_fit(changes, message):
    policy = make_policy(2)
    batch = {**make_batch(policy)[0], **changes}
    with pytest.raises(ValueError, match=message):
        given = {key: value for key, value in batch.items() if value is not None}
        family_of(policy.config).check_batch(given, policy.config)


def test_pi05_needs_noise_and_time():
    policy = make_policy(1)
    with pytest.raises(ValueError, match="needs noise and time"):
        PI05Loss(policy)(make_batch(policy)[0])


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_weight_zero_count_for_nothing_but_the_denominator(mode, in_float64):
    policy = make_policy(2).double()
    batch, noise, time = to_float64(*make_batch(policy))
    kept = torch.tensor([True, False, True, False])
    part = {key: value[kept] for key, value in batch.items()}
    _, _, expected, wanted = loss_and_gradients(policy, mode, part, noise[kept], time[kept])
    weighted = {**batch, "is_read": kept}
    # What is in the other rows does not matter.
    weighted["action"] = torch.where(kept[:, None, None], batch["action"], 1e6)
    policy.zero_grad()
    loss = PI05Loss(policy)(weighted, noise, time)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item() / 2, rel=1e-12)
    errors = gradient_errors(gradients(policy), {name: gradient / 2 for name, gradient in wanted.items()})
    assert max(errors.values()) <= 1e-12
