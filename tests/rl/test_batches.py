"""Minibatches are a function of the episodes and the seed, whichever rank computes them."""

import numpy as np
import pytest
import torch

from vla_finetuning.rl import batches
from vla_finetuning.rl.batches import Table, group_seed, minibatches, rank_of


def table():
    rng = np.random.default_rng(0)
    return Table.build(rng.integers(1, 4, 48), rng.random(48) < 0.7)


def test_the_table_has_every_decision_of_the_episodes_that_are_used():
    found = Table.build(np.array([2, 3, 1]), np.array([True, False, True]))
    assert found.episode.tolist() == [0, 0, 2] and found.decision.tolist() == [0, 1, 0]
    nothing = Table.build(np.array([2]), np.array([False]))
    assert not list(minibatches(nothing, nothing.episode, rank=0, ranks=1, size=8, micro_rows=8, key=(1,)))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("micro_rows", [4, 100])
def test_ranks_together_compute_every_row_once_in_equally_many_micro_batches(ranks, micro_rows):
    rows = table()
    owner = rank_of(rows.episode // 8, ranks)
    options = {"ranks": ranks, "size": 20, "micro_rows": micro_rows, "key": (1, 2, 3)}
    whole = list(minibatches(rows, np.zeros_like(owner), rank=0, **{**options, "ranks": 1}))
    each = [list(minibatches(rows, owner, rank=rank, **options)) for rank in range(ranks)]
    assert sum(one.rows for one in whole) == len(rows.episode) and max(one.rows for one in whole) <= 20
    assert max(one.rows for one in whole) - min(one.rows for one in whole) <= 1
    for number, expected in enumerate(whole):
        parts = [rank[number] for rank in each]
        assert {part.rows for part in parts} == {expected.rows} and len({len(part.micros) for part in parts}) == 1
        found = np.concatenate([micro for part in parts for micro in part.micros])
        assert sorted(found) == sorted(np.concatenate(expected.micros))
        for rank, part in enumerate(parts):
            assert all(len(micro) <= micro_rows and (owner[micro] == rank).all() for micro in part.micros)
    other = list(minibatches(rows, owner * 0, rank=0, **{**options, "ranks": 1, "key": (1, 2, 4)}))
    assert not np.array_equal(other[0].micros[0], whole[0].micros[0])


def test_groups_begin_elsewhere_in_every_iteration_and_never_where_held_out_episodes_do():
    seeds = {group_seed(seed, iteration, group) for seed in range(3) for iteration in range(20) for group in range(16)}
    assert len(seeds) == 3 * 20 * 16 and min(seeds) >= 2**31 and max(seeds) < 2**32


def test_a_rank_that_remembers_nothing_has_a_row_of_zeros_as_others_have(monkeypatch):
    theirs = {"tokens": torch.ones(3, 5, dtype=torch.int64), "image": torch.ones(3, 4, 4, 3, dtype=torch.uint8)}

    def gather(ranks, mine):
        ranks[:] = [{key: (tuple(value.shape[1:]), value.dtype) for key, value in theirs.items()}, mine]

    monkeypatch.setattr(batches.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(batches.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(batches.dist, "all_gather_object", gather)
    filled = batches.pad_empty({})
    assert {key: (tuple(v.shape), v.dtype, int(v.sum())) for key, v in filled.items()} == {
        "tokens": ((1, 5), torch.int64, 0),
        "image": ((1, 4, 4, 3), torch.uint8, 0),
    }
    assert batches.pad_empty(theirs) is theirs
