"""FAST (arXiv 2501.09747): encode action chunks as tokens by cosine transform, rounding and byte-pair encoding.

Transform and files are compatible with the published tokenizer. `tokenizer.json` and `processor_config.json` of a
folder or a Hub repository are read as data; the repository's Python code is never run.

Legend: N chunks, T actions of a chunk, A action dimensions.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy.fft import dct, idct
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from vla_finetuning.data.hub import download_snapshot, resolve_commit
from vla_finetuning.files import write_json, write_whole
from vla_finetuning.policies.family import Chunks
from vla_finetuning.policies.tokenizer_check import check_tokenizer

MODEL_FILE, SETTINGS_FILE = "tokenizer.json", "processor_config.json"
# Folder inside a run with action tokens, and inside its exported policy.
ACTION_TOKENIZER_FOLDER = "action_tokenizer"
SCALE = 10.0
# Vocabulary of a tokenizer that a run fits, as in arXiv 2505.23705.
VOCABULARY = 1024
# Every byte is a token, so that each text can be encoded.
LEAST_VOCABULARY = len(pre_tokenizers.ByteLevel.alphabet())
# Last code point before the surrogates, which no text can contain.
LAST_LETTER = 0xD7FF


@dataclass(frozen=True)
class ActionTokenizer:
    """Tokenizer of action chunks with entries normalised to about -1 to 1.

    Attributes:
        model: byte-pair encoding in the JSON of `tokenizers`.
        scale: factor of coefficients before rounding; coefficients are exact to 0.5 / scale.
        lowest: least coefficient; smaller coefficients are clamped to it.
    """

    model: str = field(repr=False)
    scale: float = SCALE
    lowest: int = 0

    @cached_property
    def _bpe(self) -> Tokenizer:
        return Tokenizer.from_str(self.model)

    @property
    def vocabulary(self) -> int:
        return self._bpe.get_vocab_size()

    @classmethod
    def fit(cls, chunks: np.ndarray, vocabulary: int, scale: float = SCALE) -> ActionTokenizer:
        """Fit a tokenizer with at least LEAST_VOCABULARY tokens to chunks, float (N, T, A).

        The same chunks in the same order give the same tokenizer. Raises ValueError unless all values are finite.
        """
        if not len(chunks) or not np.isfinite(chunks).all():
            raise ValueError(
                f"an action tokenizer is fitted to finite chunks, not to {len(chunks)} with NaN or infinity"
            )
        coefficients = _coefficients(chunks, scale)
        lowest = int(coefficients.min())
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
        )
        bpe.train_from_iterator(_texts(coefficients, lowest), trainer)
        return cls(bpe.to_str(), scale, lowest)

    @classmethod
    def load(cls, folder: Path) -> ActionTokenizer:
        """Load a tokenizer from the files of `save` or of FAST's authors; raise ValueError for others."""
        try:
            settings = json.loads((folder / SETTINGS_FILE).read_text())
            tokenizer = cls((folder / MODEL_FILE).read_text(), float(settings["scale"]), int(settings["min_token"]))
            vocabulary = tokenizer.vocabulary
        except Exception as error:  # `tokenizers` raises plain `Exception`
            raise ValueError(
                f"{folder} is no action tokenizer ({type(error).__name__}: {error}): {MODEL_FILE} and {SETTINGS_FILE} "
                "with scale and min_token are expected, as of physical-intelligence/fast"
            ) from error
        if not (vocabulary and math.isfinite(tokenizer.scale) and tokenizer.scale > 0):
            raise ValueError(f"{folder}: an action tokenizer of {vocabulary} tokens and scale {tokenizer.scale:g}")
        return tokenizer

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        settings = {"scale": self.scale, "vocab_size": self.vocabulary, "min_token": self.lowest}
        write_json(folder / SETTINGS_FILE, settings)
        write_whole(folder / MODEL_FILE, self.model)  # last: its presence means that both files exist

    def encode(self, chunks: np.ndarray) -> list[list[int]]:
        """Encode chunks, float (N, T, A), as tokens, lowest frequencies first.

        Raises ValueError for a coefficient without tokens, which `tokenizers` would leave out.
        """
        texts = _texts(_coefficients(chunks, self.scale), self.lowest)
        tokens = [encoding.ids for encoding in self._bpe.encode_batch(texts, add_special_tokens=False)]
        if self._bpe.decode_batch(tokens, skip_special_tokens=False) != texts:
            raise ValueError("the action tokenizer has no tokens for some values; give --train.action_tokenizer fit")
        return tokens

    def decode(self, tokens: Sequence[Sequence[int]], shape: tuple[int, int]) -> np.ndarray:
        """Decode tokens to chunks of `shape` (T, A), float64 (N, T, A). Raises ValueError for another shape."""
        texts = self._bpe.decode_batch(tokens, skip_special_tokens=False)
        codes = np.array([[ord(letter) for letter in text] for text in texts], np.int64).reshape(-1, *shape)
        return np.asarray(idct((codes + self.lowest) / self.scale, axis=1, norm="ortho"))


def fetch_tokenizer(name: str) -> Path:
    """Return the folder of a tokenizer, given its path or the name of a Hub repository, which is downloaded.

    Raises ValueError if there is neither, or if the tokenizer takes too long to load.
    """
    folder, files = Path(name).expanduser(), (MODEL_FILE, SETTINGS_FILE)
    if not folder.is_dir():
        try:
            commit = resolve_commit(name, None, repo_type="model")
            folder = Path(download_snapshot(name, commit, repo_type="model", allow_patterns=files))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--train.action_tokenizer={name}: no folder, and the Hub gives none of that name ({error}); give fit, "
                "a folder or physical-intelligence/fast"
            ) from error
    check_tokenizer(folder / MODEL_FILE)
    return folder


def _coefficients(chunks: np.ndarray, scale: float) -> np.ndarray:
    """Compute scaled and rounded cosine coefficients over time, int64 (N, T, A)."""
    return np.around(dct(np.asarray(chunks, np.float64), axis=1, norm="ortho") * scale).astype(np.int64)


def _texts(coefficients: np.ndarray, lowest: int) -> list[str]:
    """Write each chunk as a text with a character per coefficient, lowest frequencies first."""
    letters = np.clip(coefficients - lowest, 0, LAST_LETTER)
    return ["".join(map(chr, chunk.flat)) for chunk in letters]


def describe_tokens(tokenizer: ActionTokenizer, sample: Sequence[Chunks]) -> list[str]:
    """Describe the number of tokens of chunks, and the errors of decoded actions in their units."""
    lines = []
    for chunks in (some for some in sample if len(some.values)):  # a robot may have none of the rows
        values = chunks.values
        tokens = tokenizer.encode(values)
        counts, columns = np.array([len(ids) for ids in tokens]), columns_of(values[0].size)
        share = (counts >= columns).mean()
        cut = f"; {share:.1%} have more than {columns - 1}, and the loss ignores their last ones" if share else ""
        back = replace(chunks, values=tokenizer.decode(tokens, values.shape[1:]))
        apart = np.abs(back.actions - chunks.actions)
        errors = zip(chunks.names, apart.mean(axis=(0, 1)), apart.max(axis=(0, 1)), strict=True)
        text = "error of the decoded actions, mean (maximum): "
        text += ", ".join(f"{name} {mean:.2g} ({most:.2g})" for name, mean, most in errors)
        lines += [
            f"Actions      {chunks.label}as {tokenizer.vocabulary} tokens: {np.median(counts):.0f} a chunk of "
            f"{values[0].size} entries (at most {counts.max()}) in {len(values)} chunks{cut}",
            *textwrap.wrap(text, 118, initial_indent=" " * 13, subsequent_indent=" " * 13, break_long_words=False),
        ]
    return lines


def columns_of(entries: int) -> int:
    """Return the most tokens of a chunk that count: one per two entries, in steps of 32. FAST needs one per 3 to 13."""
    return 32 * math.ceil((entries / 2 + 1) / 32)
