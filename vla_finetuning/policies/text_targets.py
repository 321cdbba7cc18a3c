"""Text of a row, as its subtask: what the backbone learns to write, or what the prompt of the row's actions says.

Of every second row of a run the prompt ends with the text (`with_text`); of the others the text is a target, which
nothing else sees. So actions are learned with and without it, and what writes the text is told none.

Legend: N rows, S tokens of a text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_finetuning.policies.family import Columns
from vla_finetuning.policies.texts import TASK

# Columns of a row: its text with a token before and after it, and which of its tokens but the first there are.
TEXT, TEXT_MASK = "text_tokens", "text_tokens_mask"
# Most tokens of a text, the one after it included: S.
TEXT_COLUMNS = 32


def with_text(instruction: str, text: str) -> str:
    """Return an instruction as a prompt that says the text has it; without a text as it is."""
    return f"{instruction}, Subtask: {text}" if text else instruction


def one_line(text: str | None) -> str:
    """Return a text of a dataset as it is trained on: words between single spaces, none of them with underscores."""
    return " ".join((text or "").replace("_", " ").split())


def ends_of_text(tokenizer: Any) -> tuple[int, int]:
    """Return the tokens before and after a text; padding, of a tokenizer that has none for that."""
    begin, end, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    return pad if begin is None else begin, pad if end is None else end


@dataclass(frozen=True)
class WithText:
    """`prepare`, of rows whose prompts say their text, and of the others TEXT int64 (N, S + 1) and TEXT_MASK (N, S).

    Rows of a run's stream at odd positions say it. Rows without a text, or with an empty one, stay as they are.

    Args:
        column: with the texts. tokenizer: of the policy.
    """

    prepare: Callable[[Columns], Columns]
    column: str
    tokenizer: Any

    def __call__(self, batch: Columns) -> Columns:
        """Raise ValueError for a text that is too long, or has a word that the tokenizer lacks."""
        texts = [one_line(text) for text in batch[self.column]]
        says = batch["position"] % 2 == 1 if "position" in batch else np.zeros(len(texts), bool)
        task = [
            with_text(task, text) if say else task for task, text, say in zip(batch[TASK], texts, says, strict=True)
        ]
        prepared = self.prepare({**batch, TASK: np.array(task, object)})
        begin, end = ends_of_text(self.tokenizer)
        tokens = np.full((len(texts), TEXT_COLUMNS + 1), end, np.int64)
        mask = np.zeros((len(texts), TEXT_COLUMNS), bool)
        for row, text in enumerate(texts):
            if not text or says[row]:
                continue
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
            tokens[row, : len(ids)], mask[row, : len(ids) - 1] = ids, True
        return {**prepared, TEXT: tokens, TEXT_MASK: mask}
