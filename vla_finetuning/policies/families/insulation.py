"""Knowledge insulation (arXiv 2505.23705): PI0.5's backbone learns action tokens, and its expert learns the flow.

One forward computes the segments [images, prompt] [action tokens] [text] [noisy actions]. Action tokens attend to the
prefix and to earlier action tokens, text tokens (`text_targets`) to the prefix and to earlier text tokens. Noisy
actions attend to the prefix and to each other. The expert gets detached keys and values of the prefix, so
the backbone learns only from the cross-entropy of tokens. Rows without actions train only their text.

Legend: B batch, K draws of noise and time per row, T chunk, A action, F action tokens, S text tokens, P prefix tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from lerobot.configs import PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import ACTION, OPENPI_ATTENTION_MASK_VALUE
from torch import Tensor, nn

from vla_finetuning.columns import IS_SKIPPED
from vla_finetuning.options.train import TrainOptions
from vla_finetuning.policies.action_tokens import (
    ACTION_TOKENIZER_FOLDER,
    LEAST_VOCABULARY,
    MODEL_FILE,
    VOCABULARY,
    ActionTokenizer,
    columns_of,
    describe_tokens,
    fetch_tokenizer,
)
from vla_finetuning.policies.attention import Shape
from vla_finetuning.policies.families.pi05 import PI05, PI05Loss, Prefix, image_tokens, norm, suffix_layer
from vla_finetuning.policies.family import MEAN_COUNT, Chunks, Columns, Family, PolicyLoss
from vla_finetuning.policies.flow import ROW_FACTORS, repeat_rows
from vla_finetuning.policies.text_targets import TEXT, TEXT_COLUMNS, WithText, padded
from vla_finetuning.policies.tiny_pi05 import SPARE_WORD
from vla_finetuning.terminal import print_safe

# Column of a batch: action tokens as `padded` returns them; rows without an action have none.
TOKENS = "action_tokens"
# Suffix of the column with the flat indices of the targets in a column of tokens, of rows that could be read.
INDICES = "_indices"
# PaliGemma's last words stand for image segments; LeRobot's PI0-FAST does not use them either.
LAST_WORDS = 128
# Layers with adapters, as --peft.target_modules: LeRobot's own choice has none in the language model.
ADAPTED = r".*(language_model|gemma_expert).*\.(q_proj|v_proj)"


class InsulatedLoss(PI05Loss):
    """Cross-entropy of action and text tokens plus `flow_weight` times PI0.5's loss, whose gradient ends at the expert.

    The cross-entropy is a mean over the tokens of the batch. The flow loss is a mean over the rows with an action
    (those with action tokens). With MEAN_COUNT both are means over the whole optimizer step. Logits are computed only
    for tokens with a loss (`micro_batch`). Logits of action tokens cover only the words that stand for action tokens;
    logits of text cover all words, as in `write`. The output head is the word embedding, as in PaliGemma.
    """

    def __init__(
        self, policy: PreTrainedPolicy, *, vocabulary: int, flow_weight: float, text: bool = False, **options: Any
    ):
        super().__init__(policy, **options)
        self._end, self._flow_weight = vocabulary, flow_weight
        self._segments = {"tokens": token_columns(policy.config), **({"text": TEXT_COLUMNS} if text else {})}
        trained = any(parameter.requires_grad for parameter in policy.parameters())
        if trained and not any(parameter.requires_grad for parameter in self._language_model.parameters()):
            raise ValueError(
                "--train.knowledge_insulation: the language model has no adapter that could learn from tokens; give "
                f"--peft.target_modules '{ADAPTED}'"
            )
        self._token_layer = self._compiled(_token_layer)

    def prefix_of_flow(self, prefix: Prefix) -> Prefix:
        return replace(prefix, keys_values=[(key.detach(), value.detach()) for key, value in prefix.keys_values])

    def reduce(self, losses: Tensor, batch: Mapping[str, Tensor], draws: int, per_row: bool) -> Tensor:
        """Reduce the flow loss of rows with an action; with `per_row`, others are NaN, which means by robot skip."""
        absent = ~repeat_rows(_has_action(batch), draws)[:, None, None]
        reduced = super().reduce(losses.masked_fill(absent, math.nan if per_row else 0.0), batch, draws, per_row)
        return reduced if per_row else reduced * (len(batch[TOKENS]) / self._mean_count(batch)[1].to(reduced.dtype))

    def combine(self, losses: Tensor, prefix: Prefix, batch: Mapping[str, Tensor], draws: int, per_row: bool) -> Tensor:
        flow = super().combine(losses, prefix, batch, draws, per_row)
        by_token, metrics = self.token_losses(prefix, batch), {}
        if TEXT in batch:
            by_text = self.text_losses(prefix, batch)
            metrics["text_loss"] = by_text.sum() / _loss_mask(batch, TEXT).sum()  # NaN, which is skipped, for none
            by_token = torch.cat([by_token, by_text], dim=1)
        for factor in batch.keys() & ROW_FACTORS:
            by_token = by_token * batch[factor][:, None]
        if per_row:
            counts = _all_loss_masks(batch).sum(dim=1).clamp_min(1)
            flow = flow.masked_fill(~repeat_rows(_has_action(batch), draws), 0.0)
            return (by_token.sum(dim=1) / counts).repeat_interleave(draws) + self._flow_weight * flow
        cross_entropy = by_token.sum() / self._mean_count(batch)[0]
        self.add_metrics({"flow_loss": flow, "token_loss": cross_entropy, **metrics})
        return cross_entropy + self._flow_weight * flow

    def count(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of tokens with a loss and the number of rows with an action, (2,)."""
        return torch.stack([_all_loss_masks(batch).sum(), _has_action(batch).sum()])

    def _mean_count(self, batch: Mapping[str, Tensor]) -> Tensor:
        return batch[MEAN_COUNT] if MEAN_COUNT in batch else self.count(batch).clamp_min(1)

    def token_losses(self, prefix: Prefix, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the cross-entropy of each action token, float32 (B, F); 0 for padding."""
        embedding = self._language_model.embed_tokens
        # Two more words follow the action tokens: the end, which is a target, and the beginning, which is not.
        unused = LAST_WORDS if spare_words(self.policy.config) is None else 0
        first = embedding.num_embeddings - 1 - unused
        words = first - torch.arange(self._end + 1, device=batch[TOKENS].device)
        hidden = self._run_tokens(prefix, embedding(first - _inputs(batch[TOKENS])))
        return _token_losses(hidden, embedding(words) / embedding.embed_scale, batch, TOKENS)

    def text_losses(self, prefix: Prefix, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the cross-entropy of each text token, float32 (B, S); 0 for padding."""
        embedding = self._language_model.embed_tokens
        hidden = self._run_tokens(prefix, embedding(_inputs(batch[TEXT])))
        return _token_losses(hidden, embedding.weight, batch, TEXT)

    def _run_tokens(self, prefix: Prefix, hidden: Tensor) -> Tensor:
        """Run the language model causally over N tokens after the prefix, from and to hidden (B, N, width)."""
        language_model = self._language_model
        hidden = hidden.to(self._prefix_dtype or hidden.dtype)
        steps = hidden.shape[1]
        rotation = self._rotation(hidden, prefix.length + torch.arange(steps, device=hidden.device))
        later = torch.full((steps, steps), OPENPI_ATTENTION_MASK_VALUE, device=hidden.device).triu(1)
        bias = torch.cat([prefix.bias.expand(-1, -1, steps, -1), later.expand(len(hidden), 1, -1, -1)], dim=-1)
        settings = self.attention, not self._checkpointing
        for layer, (key, value) in zip(language_model.layers, prefix.keys_values, strict=True):
            hidden = self._run(self._token_layer, layer, hidden, rotation, bias, key, value, *settings)
        return norm(language_model.norm, hidden)[0]

    def layers(self) -> tuple[nn.Module, ...]:
        return (*super().layers(), self._language_model.layers[-1])

    def attentions(self, cameras: int, prompts: Any) -> list[tuple[nn.Module, Shape]]:
        prompts = tuple(prompts)
        language = self._language_model.layers[0]
        images = cameras * image_tokens(self.policy.config)
        shapes = [
            Shape(name, tokens, images, prompt, tokens, backward=True, causal=True)
            for name, tokens in self._segments.items()
            for prompt in prompts
        ]
        return [*super().attentions(cameras, prompts), *((language.self_attn, shape) for shape in shapes)]


# A function of its own, because Dynamo limits the shapes of each function.
def _token_layer(layer: Any, hidden: Tensor, *inputs: Any) -> Tensor:
    return suffix_layer(layer, hidden, *inputs)


def _inputs(tokens: Tensor) -> Tensor:
    """Return the tokens before each target; any for padding, which has no loss and which no target attends to."""
    return tokens[:, :-1].clamp_min(0)


def _token_losses(hidden: Tensor, head: Tensor, batch: Mapping[str, Tensor], name: str) -> Tensor:
    targets, indices = batch[name][:, 1:], batch[name + INDICES]
    logits = F.linear(hidden.flatten(0, 1).index_select(0, indices), head.to(hidden.dtype)).float()
    losses = F.cross_entropy(logits, targets.flatten().index_select(0, indices), reduction="none")
    return losses.new_zeros(targets.numel()).index_copy(0, indices, losses).view(targets.shape)


def _has_action(batch: Mapping[str, Tensor]) -> Tensor:
    return batch[TOKENS][:, 0] >= 0


def _loss_mask(batch: Mapping[str, Any], name: str) -> Any:
    """Return the mask of the targets in a column of tokens, without those of unreadable rows, bool (B, N)."""
    mask = batch[name][:, 1:] >= 0
    return mask & batch["is_read"][:, None] if "is_read" in batch else mask


def _all_loss_masks(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mask of all tokens with a loss, bool (B, F) or with text (B, F + S)."""
    return torch.cat([_loss_mask(batch, name) for name in (TOKENS, TEXT) if name in batch], dim=1)


@dataclass(frozen=True)
class InsulatedPI05(PI05):
    """PI0.5 with --train.knowledge_insulation.

    Attributes:
        action_tokenizer: None before it is fitted to the run's rows.
        vocabulary: number of action tokens, also of a tokenizer that is not fitted yet.
        text: column with target texts; None for no text targets.
    """

    action_tokenizer: ActionTokenizer | None = None
    flow_weight: float = 1.0
    vocabulary: int = 0
    text: str | None = None

    train_options = PI05.train_options | {"exact_mean", "knowledge_insulation"}

    def parts(self, policy: PreTrainedPolicy) -> Mapping[str, str]:
        """Assign parts as PI0.5 does, but the whole language model is used: action tokens pass all of its layers."""
        language = "model.paligemma_with_expert.paligemma.model.language_model."
        parts = super().parts(policy)
        return {name: "language model" if name.startswith(language) else part for name, part in parts.items()}

    def make_loss(self, policy: PreTrainedPolicy, **options: Any) -> PolicyLoss:
        options |= {"vocabulary": self.vocabulary, "flow_weight": self.flow_weight, "text": self.text is not None}
        return InsulatedLoss(policy, **options)

    def prepared(
        self,
        prepare: Callable[[Columns], Columns],
        config: PreTrainedConfig,
        tokenizer_step: Any,
        without_actions: Sequence[int] = (),
    ) -> Callable[[Columns], Columns]:
        """Wrap `prepare` to add text tokens, and action tokens if there is a tokenizer."""
        if self.text is not None:
            prepare = WithText(prepare, self.text, tokenizer_step.input_tokenizer, without_actions)
        if (tokenizer := self.action_tokenizer) is not None:
            prepare = WithActionTokens(prepare, tokenizer, token_columns(config), without_actions)
        return prepare

    def micro_batch(self, columns: Columns) -> Columns:
        """Add the flat indices of tokens with a loss, int64 (M,): on the device they would need a host read."""
        masks = {name: _loss_mask(columns, name) for name in (TOKENS, TEXT) if name in columns}
        return {**columns, **{name + INDICES: np.flatnonzero(mask) for name, mask in masks.items()}}

    def fit_to_rows(self, chunks: Callable[[], Sequence[Chunks]], folder: Path | None) -> InsulatedPI05:
        """Load the tokenizer that checkpoints were trained with, or fit one.

        Raises:
            ValueError: the folder holds no valid tokenizer, or another one than the option names.
        """
        tokenizer = self._written(folder)
        if tokenizer is None:
            sample = chunks()
            values = np.concatenate([robot.values for robot in sample])
            tokenizer = self.action_tokenizer or ActionTokenizer.fit(values, self.vocabulary)
            print_safe(*describe_tokens(tokenizer, sample))
        return replace(self, action_tokenizer=tokenizer, vocabulary=tokenizer.vocabulary)

    def _written(self, folder: Path | None) -> ActionTokenizer | None:
        """Return the tokenizer in the run's folder; refuse another one than the option names."""
        if folder is None or not ((folder := folder / ACTION_TOKENIZER_FOLDER) / MODEL_FILE).is_file():
            return None
        written = ActionTokenizer.load(folder)
        if self.action_tokenizer not in (None, written):
            raise ValueError(
                f"--train.action_tokenizer: {folder} has the tokenizer that this run was started with, and it is "
                "another one: leave the option as it was, or start a new run"
            )
        return written

    def save_fitted(self, folder: Path) -> None:
        if self.action_tokenizer is not None:
            self.action_tokenizer.save(folder / ACTION_TOKENIZER_FOLDER)

    def empty_inputs(
        self, config: Any, rows: int, draws: int, device: torch.device | str
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        batch, noise, time = super().empty_inputs(config, rows, draws, device)
        for name, targets in {TOKENS: token_columns(config), **({TEXT: TEXT_COLUMNS} if self.text else {})}.items():
            batch[name] = torch.empty(rows, targets + 1, dtype=torch.int64, device=device)
            batch[name + INDICES] = torch.empty(rows * targets, dtype=torch.int64, device=device)
        return batch, noise, time

    def tokens(self, config: Any, cameras: int, draws: int = 1, prompt: int | None = None) -> int:
        text = 0 if self.text is None else TEXT_COLUMNS
        return super().tokens(config, cameras, draws, prompt) + token_columns(config) + text


@dataclass(frozen=True)
class WithActionTokens:
    """Run `prepare` and add TOKENS int64 (N, F + 1), from begin token to end token; none for rows `without_actions`.

    Keep the first F tokens of a longer chunk: they encode the lowest frequencies.
    """

    prepare: Callable[[Columns], Columns]
    tokenizer: ActionTokenizer
    columns: int
    without_actions: Sequence[int] = ()

    def __call__(self, batch: Columns) -> Columns:
        prepared = self.prepare(batch)
        absent, end = np.isin(batch["dataset_index"], self.without_actions), self.tokenizer.vocabulary
        counted = ~(absent | batch.get(IS_SKIPPED, False))  # the values of others may have no tokens
        tokens = iter(self.tokenizer.encode(prepared[ACTION][counted]))
        rows = [
            [] if skip else [end + 1, *(next(tokens) if counts else ()), end]
            for skip, counts in zip(absent, counted, strict=True)
        ]
        return {**prepared, TOKENS: padded(rows, self.columns)}


def insulated(plain: Family, config: PreTrainedConfig, train: TrainOptions, folder: Path | None) -> InsulatedPI05:
    """Return the family that replaces `plain` in a run with --train.knowledge_insulation from the policy in `folder`.

    Raises:
        ValueError: the tokenizer cannot be read, or has more tokens than the policy has words for.
    """
    words, name, tokenizer = spare_words(config), train.action_tokenizer, None
    if name == "auto" and folder is not None and (folder / ACTION_TOKENIZER_FOLDER).is_dir():
        name = str(folder / ACTION_TOKENIZER_FOLDER)
    if name not in ("auto", "fit"):
        tokenizer = ActionTokenizer.load(fetch_tokenizer(name))
    vocabulary = VOCABULARY if words is None else min(VOCABULARY, words - 2)
    if tokenizer is not None:
        vocabulary = tokenizer.vocabulary
    # Their end and their beginning need words, too.
    if words is not None and not LEAST_VOCABULARY <= vocabulary <= words - 2:
        raise ValueError(
            f"--train.knowledge_insulation: {max(vocabulary, LEAST_VOCABULARY)} action tokens and two marks need spare "
            f"words in the policy's vocabulary, and it has {words} (words that begin with {SPARE_WORD!r}): give a "
            "policy of `python vla.py --preset demo --train.knowledge_insulation true`"
        )
    return InsulatedPI05(
        **{item.name: getattr(plain, item.name) for item in fields(plain)},
        action_tokenizer=tokenizer,
        flow_weight=train.flow_weight,
        vocabulary=vocabulary,
        text=train.text_targets,
    )


def token_columns(config: Any) -> int:
    """Return F."""
    return columns_of(config.chunk_size * config.output_features[ACTION].shape[0])


def spare_words(config: PreTrainedConfig) -> int | None:
    """Count the words for action tokens in the policy's own vocabulary; return None for PaliGemma's vocabulary."""
    own = getattr(config, "vocabulary", None)
    return None if own is None else sum(word.startswith(SPARE_WORD) for word in own)


BY_OPTION = {"knowledge_insulation": (PI05, insulated)}
