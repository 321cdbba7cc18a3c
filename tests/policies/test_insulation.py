"""Knowledge insulation against one plain forward per part of LeRobot's own modules."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lerobot.policies.common.vla_utils import make_att_2d_masks, prepare_attention_masks_4d
from scipy.fft import dct

from tests.tiny import ACTION_DIM, make_batch, make_policy, reference
from util import DeviceMetrics
from vla_finetuning.options.peft import PeftOptions
from vla_finetuning.options.train import TrainOptions
from vla_finetuning.policies.action_tokens import ActionTokenizer, describe_tokens
from vla_finetuning.policies.compiling import Compiler
from vla_finetuning.policies.families.insulation import (
    ADAPTED,
    INDICES,
    TOKENS,
    InsulatedPI05,
    WithActionTokens,
    insulated,
    token_columns,
)
from vla_finetuning.policies.families.pi05 import PI05Loss
from vla_finetuning.policies.family import MEAN_COUNT, Chunks
from vla_finetuning.policies.lora import add_adapters
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.text_targets import TEXT, TEXT_COLUMNS, padded
from vla_finetuning.policies.trainable import choose_trainable

VOCABULARY, FLOW_WEIGHT = 270, 0.7
NO_TEXT, SOME_TEXT = (), ("text",)
EXPERT = ("gemma_expert", "action_in_proj", "action_out_proj", "time_mlp")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def policy():
    words = [f"<action{number}>" for number in range(VOCABULARY + 2)]
    policy = make_policy(2, vocabulary=["go", "to", "the", "red", "bin", *words]).double()
    for parameter in policy.parameters():
        parameter.requires_grad_(True)
    return policy


def make_tokens(policy, rows=4):
    """Make rows with 1, 4, 7, ... action tokens, each ended by the end token."""
    columns = token_columns(policy.config)
    tokens = torch.randint(0, VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(1)).tolist()
    listed = [[VOCABULARY + 1, *ids[: 3 * row], VOCABULARY] for row, ids in enumerate(tokens)]
    return {TOKENS: torch.from_numpy(padded(listed, columns))}


def make_text(policy, rows=4):
    """Make rows with 0, 5, 10, ... text tokens, between the tokens of beginning and end."""
    shape = rows, TEXT_COLUMNS + 1
    tokens = torch.randint(0, policy.config.vocab_size, shape, generator=torch.Generator().manual_seed(2))
    counts = torch.arange(rows)[:, None] * 5
    return {TEXT: tokens.masked_fill(torch.arange(TEXT_COLUMNS + 1) > counts - (counts == 0).int(), -1)}


def is_target(batch, name):
    return batch[name][:, 1:] >= 0


def make_inputs(policy, text=NO_TEXT, **options):
    batch, noise, time = make_batch(policy, **options)
    batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    batch |= make_tokens(policy, len(time)) | (make_text(policy, len(time)) if text else {})
    return with_indices(batch), noise.double(), time.double()


def with_indices(batch):
    """Add the mask indices that the host of a training worker computes."""
    columns = family_of_tests().micro_batch({key: value.numpy() for key, value in batch.items()})
    return batch | {key: torch.from_numpy(value) for key, value in columns.items() if key.endswith(INDICES)}


def family_of_tests(**options):
    return InsulatedPI05("pi05", vocabulary=VOCABULARY, flow_weight=FLOW_WEIGHT, **options)


def make_loss(policy, text=None, **options):
    parts = family_of_tests().parts(policy)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(parts[name] != "unused in training")
    return family_of_tests(text=text).make_loss(policy, **options)


def plain_token_losses(policy, batch):
    """Run the full sequence through LeRobot's language model with a mask of all pairs: losses (B, F)."""
    last = policy.config.vocab_size - 1
    hidden = plain_hidden(policy, batch, last - batch[TOKENS][:, :-1].clamp_min(0))
    logits = hidden @ policy.model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight.T
    logits = logits[..., last - VOCABULARY : last + 1].flip(-1)  # the word of token t is the t-th from the end
    return F.cross_entropy(logits.transpose(1, 2), batch[TOKENS][:, 1:], reduction="none", ignore_index=-1)


def plain_text_losses(policy, batch):
    """Compute text losses (B, S) as `plain_token_losses` does."""
    hidden = plain_hidden(policy, batch, batch[TEXT][:, :-1].clamp_min(0))
    logits = hidden @ policy.model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight.T
    return F.cross_entropy(logits.transpose(1, 2), batch[TEXT][:, 1:], reduction="none", ignore_index=-1)


def plain_cross_entropy(policy, batch):
    total, count = plain_token_losses(policy, batch).sum(), is_target(batch, TOKENS).sum()
    if TEXT in batch:
        total, count = total + plain_text_losses(policy, batch).sum(), count + is_target(batch, TEXT).sum()
    return total / count


def plain_hidden(policy, batch, inputs):
    """Compute LeRobot's hidden states of words after the prefix, with causal attention among them."""
    core = policy.model
    images, image_masks = policy._preprocess_images(batch)
    words, counts = batch["observation.language.tokens"], batch["observation.language.attention_mask"]
    prefix, prefix_counts, prefix_blocks = core.embed_prefix(images, image_masks, words, counts)
    language_model = core.paligemma_with_expert.paligemma.model.language_model
    language_model.config._attn_implementation = "eager"  # as LeRobot has it before it samples
    tokens = core.paligemma_with_expert.embed_language_tokens(inputs)
    counts = torch.cat([prefix_counts, torch.ones_like(inputs, dtype=torch.bool)], dim=1)
    blocks = torch.cat([prefix_blocks, torch.ones_like(inputs, dtype=torch.bool)], dim=1)  # each its own: causal
    mask = prepare_attention_masks_4d(make_att_2d_masks(counts, blocks))
    (hidden, _), _ = core.paligemma_with_expert.forward(
        attention_mask=mask,
        position_ids=torch.cumsum(counts, dim=1) - 1,
        inputs_embeds=[torch.cat([prefix, tokens], 1), None],
    )
    return hidden[:, prefix.shape[1] :]


def gradients(policy):
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None and p.grad.any()}


def check_gradients(policy, plain, flow, within):
    """Expect expert gradients of the flow alone and backbone gradients of the tokens alone."""
    actual, of_tokens, of_flow = gradients(policy), gradients(plain), gradients(flow)
    experts = {name for name in of_flow if any(part in name for part in EXPERT)}
    backbone = of_tokens.keys() - {name for name in of_tokens if "lm_head" in name}
    assert actual.keys() == experts | backbone and experts and backbone
    for name, gradient in actual.items():
        wanted = (of_flow if name in experts else of_tokens)[name]
        # A vector added to all keys changes no attention: the true gradient of that bias is zero.
        scale = policy.get_parameter(name.replace("k_proj.bias", "k_proj.weight")).grad.norm()
        assert (gradient - wanted).norm() <= within * scale, name


@pytest.mark.parametrize(
    "attention, checkpointing, missing, text",
    [
        ("eager", False, (), SOME_TEXT),
        ("sdpa", True, ("observation.images.1",), NO_TEXT),
    ],
)
def test_insulated_loss_equals_separate_forwards(policy, attention, checkpointing, missing, text, in_float64):
    batch, noise, time = make_inputs(policy, text, missing=missing)
    plain, flow = copy.deepcopy(policy), reference(policy, noise, time)
    expected_tokens = plain_cross_entropy(plain, batch)
    expected_tokens.backward()
    expected_flow, _ = flow.forward(batch)
    (FLOW_WEIGHT * expected_flow).backward()

    loss = make_loss(policy, attention=attention, checkpointing=checkpointing)(batch, noise, time)
    loss.backward()

    assert loss.item() == pytest.approx((expected_tokens + FLOW_WEIGHT * expected_flow).item(), rel=1e-12)
    check_gradients(policy, plain, flow, 1e-9)


def test_insulated_adapter_gradients_equal_separate_forwards(policy, in_float64):
    policy.config.pretrained_path = "somewhere"
    add_adapters(policy, PeftOptions(method_type="lora", r=4, target_modules=ADAPTED))
    policy.double()
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    batch, noise, time = make_inputs(policy, SOME_TEXT)
    plain, flow = copy.deepcopy(policy), reference(policy, noise, time)
    plain_cross_entropy(plain, batch).backward()
    (FLOW_WEIGHT * flow.forward(batch)[0]).backward()
    family_of_tests(text="text").make_loss(policy)(batch, noise, time).backward()
    check_gradients(policy, plain, flow, 1e-9)


@torch.no_grad()
def test_generated_text_equals_generation_without_kv_cache(policy, in_float64):
    batch, _, _ = make_inputs(policy)
    begin, max_tokens = 3, 6
    embedding = policy.model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight
    expected = torch.full((4, 1), begin)
    for _ in range(max_tokens):
        hidden = plain_hidden(policy, batch, expected)[:, -1]
        expected = torch.cat([expected, (hidden @ embedding.T).argmax(dim=-1, keepdim=True)], dim=1)
    expected = expected[:, 1:]
    loss = PI05Loss(policy)
    assert torch.equal(loss.write(batch, begin, -1, max_tokens), expected)
    end = int(expected[1, 2])
    ended = (expected == end).cumsum(dim=1) > 0
    assert ended[1, 2:].all() and not ended.all()
    assert torch.equal(loss.write(batch, begin, end, max_tokens), expected.masked_fill(ended, end))
    assert loss.write({key: value[1:2] for key, value in batch.items()}, begin, end, max_tokens).shape[1] <= 3


def test_row_loss_and_row_weight_cover_tokens_and_flow(policy, in_float64):
    batch, noise, time = make_inputs(policy, SOME_TEXT)
    loss = make_loss(policy, text="subtask")
    actual = loss(batch, noise, time, per_row=True)
    flow = PI05Loss(policy)(batch, noise, time, per_row=True)
    total = plain_token_losses(policy, batch).sum(dim=1) + plain_text_losses(policy, batch).sum(dim=1)
    counts = is_target(batch, TOKENS).sum(dim=1) + is_target(batch, TEXT).sum(dim=1)
    assert torch.allclose(actual, total / counts + FLOW_WEIGHT * flow, rtol=1e-9)
    weight = torch.tensor([1.0, 0.0, 0.5, 1.0], dtype=torch.float64)
    expected = (total * weight).sum() / counts.sum() + FLOW_WEIGHT * (flow * weight).mean()
    assert loss({**batch, "row_weight": weight}, noise, time).item() == pytest.approx(expected.item(), rel=1e-9)


def test_unread_rows_contribute_no_tokens(policy, in_float64):
    batch, noise, time = make_inputs(policy, SOME_TEXT)
    loss = make_loss(policy)
    batch["is_read"] = torch.tensor([True, False, True, False])
    read = with_indices({key: value[::2] for key, value in batch.items()})
    batch = with_indices(batch)
    assert loss.count(batch)[0] == loss.count(read)[0]
    tokens = loss.token_losses(loss.prefix(batch), batch)
    assert torch.equal(tokens[::2], loss.token_losses(loss.prefix(read), read)) and not tokens[1::2].any()
    text = loss.text_losses(loss.prefix(batch), batch)
    assert torch.equal(text[::2], loss.text_losses(loss.prefix(read), read)) and not text[1::2].any()


def test_logits_are_computed_only_for_tokens_with_loss(policy, in_float64, monkeypatch):
    batch, noise, time = make_inputs(policy, SOME_TEXT)
    batch = with_indices({**batch, "is_read": torch.tensor([True, True, False, True])})
    shapes, cross_entropy = [], F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda logits, *rest, **options: (
        shapes.append(tuple(logits.shape)), cross_entropy(logits, *rest, **options))[1])  # fmt: skip
    make_loss(policy, text="subtask")(batch, noise, time)
    assert shapes == [(1 + 4 + 10, VOCABULARY + 1), (0 + 5 + 15, policy.config.vocab_size)]


# ---- rows without an action ------------------------------------------------------------------------------------------


def make_mixed(policy, acts):
    """Make inputs of rows with an action where `acts`."""
    batch, noise, time = make_inputs(policy, SOME_TEXT)
    batch[TOKENS] = batch[TOKENS].masked_fill(~torch.tensor(acts)[:, None], -1)
    return with_indices(batch), noise, time


def rows_of(inputs, rows):
    batch, noise, time = inputs
    return with_indices({k: v[rows] for k, v in batch.items() if INDICES not in k}), noise[rows], time[rows]


def test_rows_without_action_train_only_text(policy, in_float64):
    acts = [True, False, True, False]
    inputs = make_mixed(policy, acts)
    acting, noise, time = rows_of(inputs, acts)
    plain, flow = copy.deepcopy(policy), reference(policy, noise, time)
    expected_tokens = plain_cross_entropy(plain, inputs[0])
    expected_tokens.backward()
    expected_flow, _ = flow.forward(acting)
    (FLOW_WEIGHT * expected_flow).backward()

    loss = make_loss(policy, text="subtask")(*inputs)
    loss.backward()

    assert loss.item() == pytest.approx((expected_tokens + FLOW_WEIGHT * expected_flow).item(), rel=1e-7)
    check_gradients(policy, plain, flow, 1e-7)


def test_step_means_cover_all_tokens_and_acting_rows(policy, in_float64):
    inputs = make_mixed(policy, [False, False, True, False])
    loss = make_loss(policy, text="subtask")
    full_loss = loss(*inputs)
    count = loss.count(inputs[0])
    assert count.tolist() == [sum(int(is_target(inputs[0], name).sum()) for name in (TOKENS, TEXT)), 1]
    halves = []
    for rows in (slice(0, 2), slice(2, 4)):
        batch, noise, time = rows_of(inputs, rows)
        halves.append(loss({**batch, MEAN_COUNT: count / 2}, noise, time))
    assert full_loss.item() == pytest.approx(sum(halves).item() / 2, rel=1e-12)
    by_row = loss(*inputs, per_row=True)
    acting = loss(*rows_of(inputs, slice(2, 3)), per_row=True)
    assert by_row[2].item() == pytest.approx(acting.item(), rel=1e-9) and by_row.isfinite().all()
    texts = plain_text_losses(policy, inputs[0]).sum(dim=1)
    expected = texts / is_target(inputs[0], TEXT).sum(dim=1).clamp_min(1)
    assert torch.allclose(by_row[[0, 1, 3]], expected[[0, 1, 3]], rtol=1e-9)


def test_loss_per_robot_is_mean_over_its_rows(policy):
    inputs = make_mixed(policy, [True, False, True, False])
    inputs = (
        {k: v.float() if v.is_floating_point() else v for k, v in inputs[0].items()}
        | {"robot_index": torch.tensor([0, 0, 1, 0])},
        *map(torch.Tensor.float, inputs[1:]),
    )
    loss = make_loss(policy.float(), text="subtask").train()
    loss.metrics, loss.robots = DeviceMetrics(torch.device("cpu")), ("arm", "gantry")
    sums = loss.metrics.sums("loss_by_robot", loss.robots)
    loss(*inputs)
    flow = PI05Loss(policy)(*inputs, per_row=True)
    torch.testing.assert_close(sums, torch.stack([flow[[0, 2]], torch.ones(2)]).to(sums.dtype))


def test_exactly_trainable_parameters_get_gradients(policy):
    choose_trainable(policy, "full")
    plain = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    loss = make_loss(policy.float())
    batch, noise, time = make_batch(policy)
    loss(with_indices(batch | make_tokens(policy)), noise, time).backward()
    named = dict(policy.named_parameters())
    training = {name for name, parameter in named.items() if parameter.requires_grad}
    assert training == {name for name, parameter in named.items() if parameter.grad is not None}
    added = training - plain
    assert plain < training and all(
        "language_model.norm" in name or "language_model.layers.2" in name for name in added
    )


@pytest.mark.gate
def test_compiled_insulated_loss_equals_eager(policy, in_float64):
    plain, options = copy.deepcopy(policy), {"attention": "sdpa", "checkpointing": True}
    compiler = Compiler("aot_eager")
    module, reference = make_loss(policy, compile=compiler, **options), make_loss(plain, **options)
    for seed in range(2):
        batch, noise, time = make_inputs(policy, seed=seed)
        actual, expected = module(batch, noise, time), reference(batch, noise, time)
        assert actual.item() == pytest.approx(expected.item(), rel=1e-12)
        actual.backward(), expected.backward()
        assert compiler.compilations == 5  # layers of vision, language, actions and tokens; the last keys and values
    actual, expected = gradients(policy), gradients(plain)
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        scale = plain.get_parameter(name.replace("k_proj.bias", "k_proj.weight")).grad.norm()
        assert (gradient - expected[name]).norm() <= 1e-9 * scale, name


def test_too_small_vocabulary_for_action_tokens_is_refused(policy, chunks, tmp_path):
    ActionTokenizer.fit(chunks, VOCABULARY + 1).save(tmp_path)
    with pytest.raises(ValueError, match="271 action tokens and two marks need .* has 272"):
        insulated(family_of(policy.config), policy.config, TrainOptions(action_tokenizer=str(tmp_path)), None)


# ---- the tokenizer ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chunks():
    steps = np.random.default_rng(0).normal(size=(300, 20, ACTION_DIM)) * 0.1
    return np.cumsum(steps, axis=1).clip(-1, 1)


@pytest.fixture(scope="module")
def tokenizer(chunks):
    return ActionTokenizer.fit(chunks, 400)


def test_decoded_chunk_is_within_half_step_and_outliers_are_encoded(chunks, tokenizer):
    tokens = tokenizer.encode(chunks)
    restored = tokenizer.decode(tokens, chunks.shape[1:])
    errors = dct(restored - chunks, axis=1, norm="ortho") * tokenizer.scale
    assert np.abs(errors).max() <= 0.5 + 1e-9
    assert max(map(len, tokens)) < chunks[0].size
    assert all(0 <= token < tokenizer.vocabulary for ids in tokens for token in ids)

    outliers = np.full((2, 20, ACTION_DIM), [[[1e7]], [[-1e7]]])
    assert [len(ids) > 0 for ids in tokenizer.encode(outliers)] == [True, True]
    assert np.isfinite(tokenizer.decode(tokenizer.encode(outliers), outliers.shape[1:])).all()


def test_action_tokenizer_without_all_bytes_is_refused(chunks, tokenizer):
    units = np.zeros(ACTION_DIM), np.ones(ACTION_DIM), ("x",) * ACTION_DIM
    sample = [Chunks(values, *units) for values in (chunks, chunks[:0])]
    assert describe_tokens(tokenizer, sample) == describe_tokens(tokenizer, sample[:1])
    model = json.loads(tokenizer.model)
    model["model"] |= {"vocab": {"a": 0}, "merges": []}
    with pytest.raises(ValueError, match="no tokens for some values.*give --train.action_tokenizer fit"):
        replace(tokenizer, model=json.dumps(model)).encode(chunks)


def test_action_tokenizer_is_deterministic_and_reloads(chunks, tokenizer, tmp_path):
    assert ActionTokenizer.fit(chunks, 400) == tokenizer
    tokenizer.save(tmp_path / "tokenizer")
    assert ActionTokenizer.load(tmp_path / "tokenizer") == tokenizer


def test_encoding_equals_definition_of_fast(chunks, tokenizer):
    """Section III of the paper, a chunk at a time: transform, scale, round, lowest frequencies of all entries first."""
    for chunk, ids in zip(chunks[:20], tokenizer.encode(chunks[:20]), strict=True):
        entries = [dct(chunk[:, entry], norm="ortho") for entry in range(ACTION_DIM)]
        wanted = [round(float(entries[e][f]) * tokenizer.scale) for f in range(len(chunk)) for e in range(ACTION_DIM)]
        decoded = tokenizer._bpe.decode(ids, skip_special_tokens=False)
        assert [ord(letter) + tokenizer.lowest for letter in decoded] == wanted


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"processor_config.json": "{}"},
        {"processor_config.json": '{"scale": 10, "min_token": 0}', "tokenizer.json": "[]"},
    ],
)
def test_invalid_action_tokenizer_files_are_refused(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match="is no action tokenizer"):
        ActionTokenizer.load(tmp_path)


def test_rows_carry_action_tokens_cut_to_limit(chunks, tokenizer):
    prepare = WithActionTokens(lambda batch: {"action": batch["action"]}, tokenizer, 32, without_actions=[1])
    loud = np.random.default_rng(1).uniform(-1, 1, (1, 20, ACTION_DIM))
    columns = prepare({"action": np.concatenate([chunks[:3], loud]), "dataset_index": np.array([0, 1, 0, 0])})[TOKENS]
    first, _, _, long = tokenizer.encode(np.concatenate([chunks[:3], loud]))
    assert len(long) > 32 > len(first)
    begin, end = tokenizer.vocabulary + 1, tokenizer.vocabulary
    assert columns[0].tolist() == [begin, *first, end] + [-1] * (31 - len(first))
    assert (columns[1] == -1).all() and columns[3].tolist() == [begin, *long[:32]]


def test_only_rows_that_count_need_action_tokens(chunks, tokenizer):
    """Rows of blank values are normalised like others, and may be far from any action."""
    model = json.loads(tokenizer.model)
    letters = {letter for ids in tokenizer.encode(chunks) for i in ids for letter in tokenizer._bpe.id_to_token(i)}
    model["model"] |= {"vocab": {letter: i for i, letter in enumerate(sorted(letters))}, "merges": []}
    narrow = replace(tokenizer, model=json.dumps(model))
    prepare = WithActionTokens(lambda batch: {"action": batch["action"]}, narrow, 600, without_actions=[1])
    far = np.full((1, 20, ACTION_DIM), 1e7)
    batch = {"action": np.concatenate([far, far, chunks[:1]]), "dataset_index": np.array([1, 0, 0])}
    columns = prepare({**batch, "is_skipped": np.array([False, True, False])})[TOKENS]
    begin, end = narrow.vocabulary + 1, narrow.vocabulary
    assert [[i for i in row if i >= 0] for row in columns.tolist()] == [
        [],
        [begin, end],
        [begin, *narrow.encode(chunks[:1])[0], end],
    ]
    assert (prepare({name: values[:1] for name, values in batch.items()})[TOKENS] == -1).all()
    with pytest.raises(ValueError, match="no tokens for some values"):
        prepare(batch)
