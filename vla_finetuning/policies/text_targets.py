"""Train a policy on a text of each row, e.g. its subtask, as a part of the prompt or as a target.

The prompt of every second row of a run ends with the row's text (`with_text`). The text of the other rows is a target
that the backbone learns to write. So the policy learns actions with and without the text.

Legend: N rows, S tokens of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_finetuning.policies.family import Columns
from vla_finetuning.policies.texts import TASK

# Column of a batch: text tokens as `padded` returns them.
TEXT = "text_tokens"
# Most tokens of a text with its end token, S.
TEXT_COLUMNS = 32


def with_text(instruction: str, text: str) -> str:
    """Append `text` to an instruction as its subtask; return the instruction unchanged for an empty text."""
    return f"{instruction}, Subtask: {text}" if text else instruction


def one_line(text: str | None) -> str:
    """Normalise a text of a dataset: replace underscores and all whitespace by single spaces."""
    return " ".join((text or "").replace("_", " ").split())


def ends_of_text(tokenizer: Any) -> tuple[int, int]:
    """Return the begin and end token of texts; the padding token if the tokenizer lacks one."""
    begin, end, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    return pad if begin is None else begin, pad if end is None else end


def padded(rows: Sequence[Sequence[int]], targets: int) -> np.ndarray:
    """Pad or cut tokens of rows to a begin token and so many targets: int64 (N, targets + 1), -1 for padding."""
    tokens = np.full((len(rows), targets + 1), -1, np.int64)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids[: len(row)]
    return tokens


@dataclass(frozen=True)
class WithText:
    """Run `prepare` and add TEXT int64 (N, S + 1), from the texts of `column`.

    Rows at odd positions of a run's stream have their text in the prompt and no target, unless they are of the datasets
    `without_actions`. Rows without a text have neither.
    """

    prepare: Callable[[Columns], Columns]
    column: str
    tokenizer: Any
    without_actions: Sequence[int] = ()

    def __call__(self, batch: Columns) -> Columns:
        """Raise ValueError for a text that is too long, or with a word that the tokenizer lacks."""
        texts = [one_line(text) for text in batch[self.column]]
        in_prompt = batch["position"] % 2 == 1 if "position" in batch else np.zeros(len(texts), bool)
        in_prompt &= ~np.isin(batch["dataset_index"], self.without_actions)
        task = [
            with_text(task, text) if append else task
            for task, text, append in zip(batch[TASK], texts, in_prompt, strict=True)
        ]
        prepared = self.prepare({**batch, TASK: np.array(task, object)})
        rows = [[] if append else self._encode(text) for text, append in zip(texts, in_prompt, strict=True)]
        return {**prepared, TEXT: padded(rows, TEXT_COLUMNS)}

    def _encode(self, text: str) -> list[int]:
        if not text:
            return []
        begin, end = ends_of_text(self.tokenizer)
        ids = [begin, *self.tokenizer(text, add_special_tokens=False)["input_ids"], end]
        if len(ids) > TEXT_COLUMNS + 1:
            raise ValueError(
                f"--train.text_targets={self.column}: {text!r:.200} has {len(ids) - 2} tokens, more than "
                f"{TEXT_COLUMNS - 1}: shorten it in the dataset"
            )
        if self.tokenizer.unk_token_id in ids[1:-1]:
            raise ValueError(
                f"--train.text_targets={self.column}: the policy's tokenizer lacks a word of {text!r:.200}: name a "
                "policy whose tokenizer has it"
            )
        return ids
