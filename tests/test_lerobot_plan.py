"""The plan against an exhaustive oracle: every row of every epoch once, whatever the cuts."""

import numpy as np
import pytest

from lerobot_plan import Episodes, StreamPlan, task_bounds


def episodes(*lengths: int, dataset: int = 0) -> Episodes:
    length = np.array(lengths, np.int64)
    return Episodes(np.full(len(length), dataset, np.int32), np.arange(len(length)), np.cumsum(length) - length, length)


def read(plan: StreamPlan, first: int, last: int) -> list[tuple[int, int, int]]:
    """(epoch, dataset, index) of stream positions [first, last)."""
    rows = []
    for s in plan.slices(first, last):
        part, index = s.rows()
        rows += [
            (s.epoch, int(plan.episodes.dataset_index[s.episode[p]]), int(i)) for p, i in zip(part, index, strict=True)
        ]
    return rows


@pytest.mark.parametrize("lengths", [(5, 1, 7, 30), (1,), (1,) * 9, (64, 64), (3, 200)])
@pytest.mark.parametrize(("segment", "window"), [(4, 8), (1, 1), (32, 16), (7, 1000)])
def test_every_row_of_every_epoch_once(lengths, segment, window):
    plan = StreamPlan(episodes(*lengths), seed=3, segment_rows=segment, window_rows=window)
    n = plan.rows_per_epoch
    rows = read(plan, 0, 3 * n)
    for epoch in range(3):
        mine = rows[epoch * n : (epoch + 1) * n]
        assert {e for e, _, _ in mine} == {epoch}
        assert sorted(i for _, _, i in mine) == list(range(n))


@pytest.mark.parametrize("cut", [1, 3, 8, 11, 50])
def test_reading_on_from_anywhere_gives_the_same_rows(cut):
    plan = StreamPlan(episodes(5, 1, 7, 30), seed=3, segment_rows=4, window_rows=10)
    whole = read(plan, 0, 2 * plan.rows_per_epoch)
    pieces = [row for a in range(0, len(whole), cut) for row in read(plan, a, min(a + cut, len(whole)))]
    assert pieces == whole


def test_seeds_and_epochs_differ_and_repeat():
    def order(seed, epoch):
        plan = StreamPlan(episodes(40, 40), seed=seed, segment_rows=8, window_rows=16)
        return [i for _, _, i in read(plan, epoch * 80, epoch * 80 + 80)]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1, 2)}) == 6


def test_stored_order_without_a_seed():
    plan = StreamPlan(episodes(5, 1, 7, 30), seed=None, segment_rows=4, window_rows=10)
    assert [i for _, _, i in read(plan, 0, 43)] == list(range(43))


def test_a_window_mixes_episodes_but_keeps_runs_for_the_decoder():
    plan = StreamPlan(episodes(*[100] * 50), seed=0, segment_rows=10, window_rows=100)
    (window,) = plan.slices(100, 200)
    assert len(set(window.episode)) >= 7  # about 10 places of 50 episodes
    assert (window.end - window.start).max() == 10
    index = window.rows()[1]
    assert (np.diff(index) == 1).mean() < 0.2


def test_identity_tells_plans_apart():
    def plan(**changes):
        options = {"seed": 0, "segment_rows": 4, "window_rows": 8, **changes}
        return StreamPlan(options.pop("eps", episodes(5, 6)), **options).identity()

    assert plan() == plan()
    for change in ({"seed": 1}, {"window_rows": 9}, {"eps": episodes(6, 5)}, {"eps": episodes(5, 6, dataset=1)}):
        assert plan(**change) != plan()


@pytest.mark.parametrize(("first", "last", "task", "block"), [(0, 1000, 512, 32), (64, 900, 100, 7), (5, 6, 10, 10)])
def test_tasks_cover_the_stream_in_whole_blocks(first, last, task, block):
    bounds = task_bounds(first, last, task, block)
    assert bounds[0] == first and bounds[-1] == last
    assert ((bounds[1:-1] - first) % block == 0).all() and (np.diff(bounds) > 0).all()
    assert np.diff(bounds).max() <= task + block


def test_bad_arguments():
    with pytest.raises(ValueError, match="no episodes"):
        StreamPlan(episodes(), seed=0, segment_rows=4, window_rows=8)
    with pytest.raises(ValueError, match="must be positive"):
        StreamPlan(episodes(3), seed=0, segment_rows=0, window_rows=8)
