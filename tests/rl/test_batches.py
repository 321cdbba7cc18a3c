"""Decision tables and minibatches of ranks, against a single rank."""

import numpy as np
import pytest
import torch

from vla_finetuning.rl import batches
from vla_finetuning.rl.batches import decision_table, group_seed, minibatches, rank_of


def test_decision_table_lists_all_decisions_of_used_episodes():
    episode, decision = decision_table(np.array([2, 3, 1]), np.array([True, False, True]))
    assert episode.tolist() == [0, 0, 2] and decision.tolist() == [0, 1, 0]
    empty, _ = decision_table(np.array([2]), np.array([False]))
    assert not list(minibatches(empty, rank=0, ranks=1, size=8, micro_rows=8, key=(1,)))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("micro_rows", [4, 100])
def test_minibatches_cover_each_row_once_with_equal_micro_batch_counts(ranks, micro_rows):
    owner = rank_of(np.repeat(np.arange(12), 7) // 2, ranks)
    options = {"ranks": ranks, "size": 20, "micro_rows": micro_rows, "key": (1, 2, 3)}
    one_rank = list(minibatches(owner * 0, rank=0, **{**options, "ranks": 1}))
    each = [list(minibatches(owner, rank=rank, **options)) for rank in range(ranks)]
    counts = [count for count, _ in one_rank]
    assert sum(counts) == len(owner) and max(counts) <= 20 and max(counts) - min(counts) <= 1
    for number, (count, expected) in enumerate(one_rank):
        parts = [rank[number] for rank in each]
        assert {rows for rows, _ in parts} == {count} and len({len(micros) for _, micros in parts}) == 1
        rows = np.concatenate([micro for _, micros in parts for micro in micros])
        assert sorted(rows) == sorted(np.concatenate(expected))
        for rank, (_, micros) in enumerate(parts):
            assert all(len(micro) <= micro_rows and (owner[micro] == rank).all() for micro in micros)
    reseeded = list(minibatches(owner * 0, rank=0, **{**options, "ranks": 1, "key": (1, 2, 4)}))
    assert not np.array_equal(reseeded[0][1][0], one_rank[0][1][0])


def test_group_seeds_are_unique_and_outside_evaluation_seeds():
    seeds = {group_seed(seed, iteration, group) for seed in range(3) for iteration in range(20) for group in range(16)}
    assert len(seeds) == 3 * 20 * 16 and min(seeds) >= 2**31 and max(seeds) < 2**32


def test_rank_without_rows_is_padded_with_zero_row_of_other_ranks_shape(monkeypatch):
    theirs = {"tokens": torch.ones(3, 5, dtype=torch.int64), "image": torch.ones(3, 4, 4, 3, dtype=torch.uint8)}

    def gather(ranks, own):
        ranks[:] = [{key: (tuple(value.shape[1:]), value.dtype) for key, value in theirs.items()}, own]

    monkeypatch.setattr(batches.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(batches.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(batches.dist, "all_gather_object", gather)
    filled = batches.pad_empty({})
    assert {key: (tuple(v.shape), v.dtype, int(v.sum())) for key, v in filled.items()} == {
        "tokens": ((1, 5), torch.int64, 0),
        "image": ((1, 4, 4, 3), torch.uint8, 0),
    }
    assert batches.pad_empty(theirs) is theirs
