"""Plans divided into shards: each epoch has each row once, and a node's turns are of its own shard."""

from collections import Counter
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from tests.data.test_plan import assert_each_row_once, episodes, read, together
from vla_finetuning.data.plan import StreamPlan
from vla_finetuning.data.shards import ShardedPlan, Sharding, divide, epoch_ends

ROOTS = ("/a", "/b")


def sharded(entries, shards, turn, *, seed=3, repeated=None, cut_at=1, **options):
    """Divide a plan of `entries`; later epochs are of single rows, to test both kinds of epochs."""
    options = {"segment_rows": 4, "window_rows": 10, "cut_at": cut_at, "later_segment_rows": 1} | options
    shard = divide(entries.dataset_index, entries.length, repeated, shards, cut_at, ROOTS)[-1]
    plan = partial(StreamPlan, **options)
    return ShardedPlan(entries, repeated, Sharding(shards, turn), cut_at, ROOTS, seed=seed, plan=plan), shard


def two_datasets():
    return together(episodes(20, 1, 7, 60), episodes(33, 40, dataset=1))


@pytest.mark.parametrize("lengths", [(5, 1, 7, 30), (1,) * 9, (64, 64), (3, 200)])
@pytest.mark.parametrize(("shards", "turn", "cut_at"), [(2, 3, 1), (3, 8, 2), (5, 1, 1), (2, 500, 1)])
def test_each_epoch_has_each_row_once_from_any_position(lengths, shards, turn, cut_at):
    plan, _ = sharded(episodes(*lengths), shards, turn, cut_at=cut_at)
    n = sum(lengths)
    assert plan.rows_per_epoch == n and epoch_ends(plan, 3 * n) == [n, 2 * n, 3 * n]
    rows = assert_each_row_once(plan)
    for cut in (7, 50):
        assert [row for a in range(0, 3 * n, cut) for row in read(plan, a, min(a + cut, 3 * n))] == rows


def test_sharded_weights_and_mixtures_match_occurrences():
    datasets = two_datasets()
    weights = np.array([0.3, 2.5, 1.0, 1.7, 0.5, 3.0])
    plan, _ = sharded(datasets, 3, 4, repeated=weights)
    ends = epoch_ends(plan, 5 * plan.rows_per_epoch)
    assert np.mean(np.diff([0, *ends])) == pytest.approx(plan.rows_per_epoch, rel=0.05)
    rows, entries = read(plan, 0, ends[-1]), plan.episodes
    for end in ends:
        counts_of_row = Counter((dataset, index) for _, dataset, index in rows[:end])
        low, high = plan.occurrences(end)
        assert np.array_equal(low, high)
        for dataset, start, length, times in zip(
            entries.dataset_index, entries.start, entries.length, low, strict=True
        ):
            assert {counts_of_row[dataset, start + i] for i in range(length)} == {times}
    mixture, _ = sharded(datasets, 3, 4, weights=[3, 1])
    assert mixture.rows_per_epoch == 161 and mixture.rows_per_source == pytest.approx([121, 40], abs=2)
    rows = read(mixture, 0, 3 * 161)
    for epoch in range(3):
        counts = Counter(dataset for _, dataset, _ in rows[epoch * 161 : (epoch + 1) * 161])
        assert [counts[0], counts[1]] == mixture.rows_per_source
    # No row of a dataset comes twice more often than another.
    counts_of_row = Counter((dataset, index) for _, dataset, index in rows)
    assert len(counts_of_row) == 161
    for dataset, total in ((0, 88), (1, 73)):
        times = [counts_of_row[dataset, i] for i in range(total)]
        assert max(times) - min(times) <= 1


def test_shards_split_each_dataset_evenly():
    datasets = two_datasets()
    piece, first, rows, shard = divide(datasets.dataset_index, datasets.length, None, 3, cut_at=2, roots=ROOTS)
    for dataset, total in ((0, 88), (1, 73)):
        rows_of_shard = [rows[(shard == s) & (datasets.dataset_index[piece] == dataset)].sum() for s in range(3)]
        assert sum(rows_of_shard) == total and max(rows_of_shard) - min(rows_of_shard) <= 4
    assert not (first % 2).any() and (np.diff(shard) >= 0).all()
    # By weight, where episodes come more or less often.
    weights = np.array([1.0, 1.0, 1.0, 1.0, 3.0, 1.0])
    piece, _, rows, shard = divide(datasets.dataset_index, datasets.length, weights, 3, cut_at=1, roots=ROOTS)
    is_second = datasets.dataset_index[piece] == 1
    weights_of_shard = [(rows * weights[piece])[(shard == s) & is_second].sum() for s in range(3)]
    assert np.ptp(weights_of_shard) <= 4
    with pytest.raises(ValueError, match="--dataset.shards=9: /b has 8 training rows in 2 episodes, too few: each"):
        divide(np.array([0, 1, 1]), np.array([100, 4, 4]), None, 9, 1, ROOTS)
    with pytest.raises(ValueError, match=r"/b has 8 .* needs at least 4 \(a key frame interval\)"):
        divide(np.array([0, 1, 1]), np.array([100, 4, 4]), None, 3, 4, ROOTS)


@pytest.mark.parametrize("turn", [6, 40])
def test_turns_stay_within_one_shard_except_at_epoch_ends(turn):
    plan, shard = sharded(episodes(*[300] * 20), 4, turn)
    shard_of_row = np.concatenate([shard[s.episode[s.rows()[0]]] for s in plan.slices(0, 18000)])
    elsewhere = np.flatnonzero(shard_of_row != np.arange(18000) // turn % 4)
    assert len(elsewhere) <= 3 * 2 * turn  # of three ends
    assert all((18000 - position) % 6000 <= 2 * 4 * turn for position in elsewhere)
    starts = plan.window_starts(turn, 6000)  # of shard 1
    rows_before = np.cumsum(shard_of_row == 1)
    assert set(rows_before[starts[:-20] - 1] % 10) == {0}


@pytest.mark.parametrize("block", [6, 12, 24])
def test_node_reads_one_slice_per_window(block):
    """Turns of 12 rows of 3 shards, in blocks that are parts of them; or of two, as where there are other nodes."""
    plan, _ = sharded(episodes(*[300] * 4), 3, 12, window_rows=100, later_segment_rows=None)
    rows = read(plan, 0, 3000)
    of_node = 12 // block or 1
    for node in range(3):
        starts = np.arange(0, 3000 - 3 * of_node * block, 3 * of_node * block) + node * of_node * block
        runs = np.stack([starts, starts + of_node * block], axis=1)
        cuts = [0, *plan.window_starts(node * 12, 3000), 3000]
        rows_read, slices = [], 0
        for a, b in pairwise(cuts):
            part = runs[(runs[:, 1] > a) & (runs[:, 0] < b)].clip(a, b)
            windows = list(plan.slices_of(part)) if len(part) else []
            rows_read += [(s.epoch, 0, int(i)) for s in windows for i in s.rows()[1]]
            slices += len(windows)
        assert rows_read == [row for a, b in runs for row in rows[a:b]]
        # 10 windows, and the ends of three epochs; else one for every turn, or more.
        assert slices < 30 if block <= 12 else slices > 80


def test_identity_differs_between_divisions():
    datasets = episodes(40, 50, 60)
    divisions = (((2, 4), 3), ((2, 5), 3), ((3, 4), 3), ((2, 4), 4))
    identities = [sharded(datasets, *division, seed=seed)[0].identity() for division, seed in divisions]
    assert all(a["shards"] != b["shards"] for i, a in enumerate(identities) for b in identities[:i])
    assert identities[0] == sharded(datasets, 2, 4)[0].identity()
    with pytest.raises(ValueError, match="shards have no stored order"):
        sharded(datasets, 2, 4, seed=None)
