"""PI0.5's loss against LeRobot's own, beyond the shared tests of `test_flow_losses.py`."""

import contextlib
import copy
from collections import Counter

import numpy as np
import pytest
import torch
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.common.flow_matching import sample_time_beta
from lerobot.policies.pi_gemma import PiGemmaRMSNorm
from scipy.stats import ks_2samp
from torch.utils._python_dispatch import TorchDispatchMode

from tests.policies.flow_policies import assert_equal_gradients, gradients, lerobots, to_float64
from tests.tiny import ACTION_DIM, act_config, make_batch, make_config, make_policy, reference
from vla_finetuning.policies.families.pi05 import PI05Loss
from vla_finetuning.policies.family import PolicyLoss
from vla_finetuning.policies.flow import continue_chunk, sample_noise_and_time
from vla_finetuning.policies.processors import DeviceHalf
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.trainable import choose_trainable


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


# --- equality with LeRobot --------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, draws", [(1, 2), (4, 1)])
def test_fused_attention_gets_keys_and_values_without_zero_strides(monkeypatch, rows, draws):
    """A kernel may read a dimension of stride zero wrongly."""
    fused, strides = torch.nn.functional.scaled_dot_product_attention, []

    def record_strides(query, key, value, *args, **options):
        strides.extend(stride for heads in (key, value) for stride in heads.stride())
        return fused(query, key, value, *args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record_strides)
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


def with_action_prefix(policy, number, monkeypatch):
    """Copy LeRobot's policy so that its expert sees the first actions at time 0, one position at a time."""
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
def test_loss_of_chunks_with_action_prefix_equals_plain_loop(mode, attention, in_float64, monkeypatch):
    draws, rows = 2, 4
    policy = make_policy(2).double()
    policy.config.rtc_training_max_delay = 4
    choose_trainable(policy, mode)
    noise, time = sample_noise_and_time(policy.config, rows * draws, 0, 0, "cpu")
    batch, noise, time = to_float64(make_batch(policy)[0], noise, time)
    loss = PI05Loss(policy, attention=attention, checkpointing=mode == "full")
    batch_loss = loss(batch, noise, time)
    batch_loss.backward()
    assert batch_loss.item() == pytest.approx(loss(batch, noise, time, per_row=True).mean().item(), rel=1e-13)
    delays = [int((row[:, 0] == 0).sum()) for row in time]
    assert len(set(delays)) > 2
    total, wanted = 0.0, {}
    for number, delay in enumerate(delays):
        row = {key: value[[number // draws]] for key, value in batch.items()}
        with monkeypatch.context() as patch:
            theirs = with_action_prefix(policy, delay, patch)
            theirs.zero_grad()
            actions, from_noise = theirs.prepare_action(row), noise[[number]].clone()
            from_noise[:, :delay] = actions[:, :delay]  # noisy actions then equal these at any time
            images, masks = theirs._preprocess_images(row)
            tokens, mask = row["observation.language.tokens"], row["observation.language.attention_mask"]
            losses = theirs.model.forward(images, masks, tokens, mask, actions, from_noise, time[[number], -1, 0])
            loss = losses[:, delay:, :ACTION_DIM].sum()
            loss.backward()
        total += loss.item()
        for name, gradient in gradients(theirs).items():
            wanted[name] = wanted.get(name, 0) + gradient
    count = sum(policy.config.chunk_size - delay for delay in delays) * ACTION_DIM
    assert batch_loss.item() == pytest.approx(total / count, rel=1e-12)
    assert_equal_gradients(gradients(policy), {name: gradient / count for name, gradient in wanted.items()}, 1e-9)


def test_action_prefix_length_is_drawn_after_noise_and_time():
    config, rows = make_config(1), 4000
    noise, time = sample_noise_and_time(config, rows, 7, 3, "cpu")
    config.rtc_training_max_delay = 3
    noise_with_delay, drawn = sample_noise_and_time(config, rows, 7, 3, "cpu")
    times, weight = drawn.unbind(-1)
    assert torch.equal(noise, noise_with_delay)
    delays = (weight == 0).sum(dim=1)
    prefix_positions = torch.arange(config.chunk_size) < delays[:, None]
    assert torch.equal(times, torch.where(prefix_positions, 0.0, time[:, None]))
    assert torch.bincount(delays).tolist() == pytest.approx([rows / 4] * 4, rel=0.15)
    torch.testing.assert_close(weight, ~prefix_positions / (~prefix_positions).float().mean())


@pytest.mark.parametrize("delay", [0, 4])
def test_chunk_continuation_equals_lerobot_sampler(delay, monkeypatch):
    policy = make_policy(2).eval()
    batch, noise, _ = make_batch(policy)
    prefix = torch.randn(4, delay, ACTION_DIM, generator=torch.Generator().manual_seed(1))
    actual = continue_chunk(PI05Loss(policy), batch, noise, prefix)
    assert torch.equal(actual[:, :delay], prefix)
    theirs, start = with_action_prefix(policy, delay, monkeypatch), noise.clone()
    start[:, :delay] = theirs.prepare_action({"action": prefix})
    expected = theirs.predict_action_chunk(batch, noise=start)
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-5)
    if delay == 0:
        assert torch.equal(actual, continue_chunk(PI05Loss(policy), batch, noise))
    else:
        plain = policy.predict_action_chunk(batch, noise=start)
        assert (actual - plain)[:, delay:].abs().max() > 1e-3


def test_bfloat16_loss_equals_lerobot_to_its_precision():
    policy = make_policy(2, dtype="bfloat16")
    batch, noise, time = make_batch(policy)
    expected, _ = reference(policy, noise, time).forward(batch)
    loss = PI05Loss(policy)(batch, noise, time)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)


@pytest.mark.parametrize(("mode", "enabled_by"), [("expert", "us"), ("full", "the policy")])
def test_activation_checkpointing_changes_only_memory(mode, enabled_by):
    policy = make_policy(2, gradient_checkpointing=enabled_by == "the policy")
    choose_trainable(policy, mode)
    arguments, vlm = make_batch(policy), policy.model.paligemma_with_expert
    layers = [
        *vlm.paligemma.model.vision_tower.vision_model.encoder.layers,
        *vlm.paligemma.model.language_model.layers[:-1],
        *vlm.gemma_expert.model.layers,
    ]
    computed, saved = Counter(), Counter()
    for number, layer in enumerate(layers):
        output = getattr(layer.self_attn, "o_proj", None) or layer.self_attn.out_proj
        output.register_forward_pre_hook(lambda *_, number=number: computed.update([number]))

    def run(module):
        policy.zero_grad()
        computed.clear()
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.update(all=t.numel()) or t, lambda t: t):
            loss = module(*arguments)
        loss.backward()
        return loss.item(), copy.deepcopy(gradients(policy)), saved["all"], dict(computed)

    checkpointed = run(PI05Loss(policy, checkpointing=enabled_by == "us"))
    policy.config.gradient_checkpointing = False
    plain = run(PI05Loss(policy))
    assert checkpointed[0] == plain[0] and checkpointed[2] < plain[2] / 2
    assert all(torch.equal(checkpointed[1][name], expected) for name, expected in plain[1].items())
    # Trainable layers are computed exactly twice; nested checkpoints would compute them more often.
    trains = range(len(layers)) if mode == "full" else range(len(layers) - 3, len(layers))
    assert plain[3] == dict.fromkeys(range(len(layers)), 1)
    assert checkpointed[3] == plain[3] | dict.fromkeys(trains, 2)


def test_mask_padding_excludes_padded_steps():
    """Rows differ in padding; the mean over halves and over draws equals that of the batch."""
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
    halves = [
        masked({key: value[rows] for key, value in batch.items()}, noise[rows], time[rows]).item()
        for rows in (slice(0, 2), slice(2, 4))
    ]
    assert np.mean(halves) == pytest.approx(expected.item(), rel=1e-6)
    noise, time = sample_noise_and_time(policy.config, 8, 0, 0, "cpu")
    one_by_one = [masked(batch, noise[draw::2], time[draw::2]).item() for draw in range(2)]
    assert masked(batch, noise, time).item() == pytest.approx(np.mean(one_by_one), rel=1e-6)
    with pytest.raises(ValueError, match="7 draws of noise and time for 4 rows"):
        masked(batch, noise[:7], time[:7])
    with pytest.raises(ValueError, match="needs noise and time"):
        masked(batch)


def test_mask_padding_is_refused_for_act():
    config = act_config(make_config(1).input_features, chunk_size=4, n_action_steps=4, use_vae=False)
    policy, family = ACTPolicy(config), family_of(config)
    assert family.draw(config, 2, 0, 0, "cpu") == (None, None)
    with pytest.raises(ValueError, match="normalises images"):
        PolicyLoss(policy)
    report = choose_trainable(policy, "full")
    assert report.total == report.trainable == sum(p.numel() for p in policy.parameters())
    with pytest.raises(ValueError, match="LeRobot's own loss of a 'act' has no mask_padding"):
        family.make_loss(policy, images=DeviceHalf(None, config), mask_padding=True)


# --- what is computed -------------------------------------------------------------------------------------


def test_projections_of_actions_and_time_are_float32_under_autocast():
    policy, calls = make_policy(1), {}
    core = policy.model
    for name in ("action_in_proj", "action_out_proj", "time_mlp_in", "time_mlp_out"):
        module = getattr(core, name)
        module.register_forward_hook(lambda module, args, out, name=name: calls.update({name: (module, args[0], out)}))
    with torch.autocast("cpu", torch.bfloat16):
        PI05Loss(policy)(*make_batch(policy))
    assert len(calls) == 4
    for module, prefix_positions, result in calls.values():
        assert torch.equal(result, torch.nn.functional.linear(prefix_positions.float(), module.weight, module.bias))


def test_vision_tower_inputs_are_contiguous():
    """transformers' own are transposed views, which are slower."""
    policy, contiguous = make_policy(1), []
    for layer in policy.model.paligemma_with_expert.paligemma.model.vision_tower.vision_model.encoder.layers:
        for module in (layer.layer_norm1, layer.layer_norm2):
            module.register_forward_pre_hook(lambda module, arguments: contiguous.append(arguments[0].is_contiguous()))
    PI05Loss(policy)(*make_batch(policy))
    assert all(contiguous[:4]) and len(contiguous) > 3


# --- rotary angles ------------------------------------------------------------------------------------------


class OuterProducts(TorchDispatchMode):
    """Count matrix products over a dimension of one, such as positions times frequencies."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.count += arguments[0].shape[-1] == 1
        return function(*arguments, **(options or {}))


def test_rotary_angles_equal_gemma_without_matrix_products():
    policy = make_policy(1)
    loss, positions = PI05Loss(policy), torch.arange(968)[None].expand(2, -1)
    rotary = policy.model.paligemma_with_expert.paligemma.model.language_model.rotary_emb
    for dtype in (torch.float32, torch.bfloat16):
        actual, expected = (of(torch.empty(0, dtype=dtype), positions) for of in (loss._rotation, rotary))
        for mine, theirs in zip(actual, expected, strict=True):
            assert mine.dtype == dtype and torch.equal(mine, theirs.unsqueeze(1))
    with OuterProducts() as ours:
        loss(*make_batch(policy)).backward()
    with OuterProducts() as lerobots:
        policy.forward(make_batch(policy)[0])
    assert ours.count == 0 < lerobots.count


@pytest.mark.gpu
def test_rotary_angles_are_exact_at_reduced_matmul_precision():
    loss, before = PI05Loss(make_policy(1, head_dim=256)).cuda(), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        actual = loss._rotation(torch.empty(0, device="cuda"), torch.tensor([[900]], device="cuda"))
    finally:
        torch.set_float32_matmul_precision(before)
    rotary = loss.policy.model.paligemma_with_expert.paligemma.model.language_model.rotary_emb
    angles = 900 * rotary.inv_freq.double().cpu()
    for mine, exact in zip(actual, (angles.cos(), angles.sin()), strict=True):
        assert (mine.double().cpu().flatten() - exact.repeat(2)).abs().max() < 1e-4


# --- noise and time ---------------------------------------------------------------------------------------


def test_draws_depend_only_on_seed_and_step():
    config = make_config(1)
    noise, time = sample_noise_and_time(config, 8, 7, 3, "cpu")
    assert noise.shape == (8, 6, 32) and time.shape == (8,)
    assert noise.dtype == time.dtype == torch.float32
    torch.manual_seed(1)
    state = torch.get_rng_state()
    repeated = sample_noise_and_time(config, 8, 7, 3, "cpu")
    assert torch.equal(repeated[0], noise) and torch.equal(repeated[1], time)
    assert torch.equal(torch.get_rng_state(), state)
    for seed, step in ((8, 3), (7, 4), (3, 7)):
        changed = sample_noise_and_time(config, 8, seed, step, "cpu")
        assert not torch.equal(changed[0], noise) and not torch.equal(changed[1], time)
    many, _ = sample_noise_and_time(config, 1000, 0, 0, "cpu")
    assert many.mean().item() == pytest.approx(0, abs=0.01) and many.std().item() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("alpha, beta", [(1.5, 1.0), (2.0, 3.0)])
def test_time_has_distribution_of_lerobot(alpha, beta):
    config = make_config(1, chunk_size=1, max_action_dim=4)
    config.time_sampling_beta_alpha, config.time_sampling_beta_beta = alpha, beta
    rows = 20_000
    torch.manual_seed(0)
    options = {"scale": config.time_sampling_scale, "offset": config.time_sampling_offset}
    expected = sample_time_beta(rows, "cpu", alpha=alpha, beta=beta, **options)
    actual = sample_noise_and_time(config, rows, 0, 0, "cpu")[1]
    assert ks_2samp(actual, expected).pvalue > 0.001
    assert actual.min() >= 0.001 and actual.max() <= 1.0


# --- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"observation.images.0": torch.zeros(4, 28, 28, 3, dtype=torch.uint8)}, None),
        ({"observation.images.1": None}, None),
        ({"action": torch.zeros(4, 3)}, r"a chunk of actions has the shape \(4,\) .*, expected \(4, 6\)"),
        ({"action": torch.zeros(4, 1, 3)}, r"\(4, 1\) .*, expected \(4, 6\)"),
        ({"observation.images.0": None, "observation.images.1": None}, r"none of the policy's cameras"),
    ],
)
def test_check_batch_reports_invalid_inputs(changes, message):
    policy = make_policy(2)
    batch = {key: value for key, value in {**make_batch(policy)[0], **changes}.items() if value is not None}
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        family_of(policy.config).check_batch(batch, policy.config)


def test_unread_rows_count_only_in_denominator(in_float64):
    policy = make_policy(2).double()
    batch, noise, time = to_float64(*make_batch(policy))
    choose_trainable(policy, "full")
    read = torch.tensor([True, False, True, False])
    expected, wanted = lerobots(policy, {key: value[read] for key, value in batch.items()}, noise[read], time[read])
    actions = torch.where(read[:, None, None], batch["action"], 1e6)
    loss = PI05Loss(policy)({**batch, "is_read": read, "action": actions}, noise, time)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item() / 2, rel=1e-12)
    assert_equal_gradients(gradients(policy), {name: gradient / 2 for name, gradient in wanted.items()})
