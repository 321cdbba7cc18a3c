"""Action chunks of a plan and their tokens, against chunks that pandas reads."""

import re
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import yaml

from tests import in_process
from tests.datasets import make_dataset
from tests.tiny import make_base
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.plan.rows import Rows
from vla_finetuning.policies.action_tokens import ActionTokenizer, describe_tokens
from vla_finetuning.policies.registry import family_of
from vla_finetuning.training import chunks as chunks_module
from vla_finetuning.training.chunks import fitted, read_chunks, sample_chunks

SPARE_WORDS, CHUNK = 270, 6


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Make datasets of two robots, and a policy for the wider one."""
    folder = tmp_path_factory.mktemp("chunks")
    make_dataset(folder / "narrow", episodes=(9, 8), action_dim=3, seed=1)
    root = make_dataset(folder / "wide", episodes=(12, 9, 10), action_dim=5)
    options = {"spare_words": SPARE_WORDS, "chunk_size": CHUNK, **in_process.TINY}
    return folder, root, make_base(folder / "base", load_metadata(root), **options)


def resolved(setting, name, **changes):
    options = {"train.knowledge_insulation": "true", "output_dir": setting[0] / name, "dry_run": "true", **changes}
    return in_process.resolved(setting, **options)


def actions_of(root):
    """Return each row's chunk of actions, which repeats the last of its episode."""
    rows = pd.concat(map(pd.read_parquet, sorted((root / "data").rglob("*.parquet")))).sort_values("index")
    episodes = [np.stack(group["action"].to_list()) for _, group in rows.groupby("episode_index")]
    chunks = [
        np.concatenate([episode[row : row + CHUNK], np.repeat(episode[-1:], max(0, row + CHUNK - len(episode)), 0)])
        for episode in episodes
        for row in range(len(episode))
    ]
    return np.stack(chunks).astype(np.float64)


def test_sampled_chunks_equal_stored_actions_with_and_without_statistics(setting):
    expected = actions_of(setting[1])
    low, high = (np.quantile(expected.reshape(-1, 5), share, axis=0) for share in (0.01, 0.99))
    for statistics in ("stored", "exact"):
        run = resolved(setting, statistics, **{"dataset.statistics": statistics})
        (chunks,) = sample_chunks(run)
        assert bool(run.robots[0].missing_stats) == (statistics == "exact")
        np.testing.assert_allclose(chunks.actions, expected, atol=1e-5)
        assert chunks.names == tuple(f"motor_{number}" for number in range(5))
    np.testing.assert_allclose(chunks.values, 2 * (expected - low) / (high - low) - 1, atol=1e-4)


@pytest.mark.parametrize("statistics", ["stored", "exact"])
def test_chunks_of_each_robot_have_its_dimensions(setting, tmp_path, capsys, statistics):
    mixture = {"members": [{"root": str(setting[0] / name), "robot": name} for name in ("narrow", "wide")]}
    (tmp_path / "mix.yaml").write_text(yaml.safe_dump(mixture))
    mixed = {"dataset.root": None, "dataset.mixture": f"@{tmp_path / 'mix.yaml'}", "dataset.statistics": statistics}
    run = resolved(setting, "robots", **mixed)
    for chunks, name in zip(sample_chunks(run), ("narrow", "wide"), strict=True):
        np.testing.assert_allclose(chunks.actions, actions_of(setting[0] / name), atol=1e-5)
        assert chunks.values.shape[-1] == 5 and chunks.label == f"{name}: "
        assert not chunks.values[..., len(chunks.names) :].any()
    fitted(run, sample_chunks)
    assert "narrow: as" in capsys.readouterr().out


def test_tokenizer_of_short_run_is_fitted_to_a_readable_epoch(setting, monkeypatch):
    run = resolved(setting, "short", steps=1, batch_size=2)
    batch = {"action": np.arange(3)[:, None, None] * np.ones((1, CHUNK, 5)), "is_skipped": np.arange(3) == 1}
    batch["dataset_index"] = np.zeros(3, int)
    streams = []
    monkeypatch.setattr(Rows, "source", lambda rows, stream, *_: streams.append((stream, rows.reading.skip_log)))
    monkeypatch.setattr(chunks_module, "read_source", lambda _: SimpleNamespace(iter_batches=lambda **_: [batch]))
    (chunks,) = read_chunks(run)
    assert streams == [((0, run.rows.per_epoch), None)] and run.rows.per_epoch > run.rows.last_row
    assert chunks.values[:, 0, 0].tolist() == [0, 2]


def test_plan_shows_token_counts_and_errors_of_actions(setting, capsys):
    run = resolved(setting, "plan")
    (chunks,) = sample_chunks(run)
    tokenizer = ActionTokenizer.fit(chunks.values, SPARE_WORDS - 2)
    tokens = tokenizer.encode(chunks.values)
    decoded = chunks.zero + tokenizer.decode(tokens, (CHUNK, 5)) * (chunks.one - chunks.zero)
    errors = np.abs(decoded - actions_of(setting[1]))
    counts = sorted(map(len, tokens))
    assert family_of(run.policy.config).action_tokenizer is None
    assert fitted(run, sample_chunks).action_tokenizer == tokenizer and not run.job.output_dir.exists()
    first, *error_lines = capsys.readouterr().out.splitlines()
    numbers = re.search(r": (\d+) a chunk of 30 entries \(at most (\d+)\) in (\d+)", first).groups()
    assert [*map(int, numbers)] == [round(float(np.median(counts))), counts[-1], len(errors)]
    assert describe_tokens(tokenizer, [chunks]) == [first, *error_lines]
    text = " ".join(" ".join(error_lines).split())
    for number in range(5):
        mean, largest = re.search(rf"motor_{number} (\S+) \((\S+)\)", text).groups()
        assert float(mean) == pytest.approx(errors[..., number].mean(), rel=0.06)
        assert float(largest) == pytest.approx(errors[..., number].max(), rel=0.06)


def test_policy_without_action_tokens_reads_no_chunks(setting):
    run = resolved(setting, "plain", **{"train.knowledge_insulation": None})
    assert fitted(run, lambda run: pytest.fail("read")) == family_of(run.policy.config)
