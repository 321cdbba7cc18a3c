"""The plan against an exhaustive oracle: every row of every epoch once, whatever the cuts."""

import hashlib
import pickle
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from benchmarks.plan import STAGES, make, measure
from vla_finetuning.data import plan as data_plan
from vla_finetuning.data.plan import Episodes, StreamPlan, evenly_spaced, window_and_segment
from vla_finetuning.data.shards import epoch_ends
from vla_finetuning.data.shares import Interleaver, apportion, fair_share


def episodes(*lengths: int, dataset: int = 0) -> Episodes:
    length = np.array(lengths, np.int64)
    return Episodes(np.full(len(length), dataset, np.int32), np.arange(len(length)), np.cumsum(length) - length, length)


def together(*datasets: Episodes) -> Episodes:
    return Episodes(*(np.concatenate([getattr(e, name) for e in datasets]) for name in Episodes.__annotations__))


def read(plan: StreamPlan, first: int, last: int) -> list[tuple[int, int, int]]:
    """(epoch, dataset, index) of stream positions [first, last)."""
    rows = []
    for s in plan.slices(first, last):
        part, index = s.rows()
        rows += [
            (s.epoch, int(plan.episodes.dataset_index[s.episode[p]]), int(i)) for p, i in zip(part, index, strict=True)
        ]
    return rows


@pytest.fixture(params=[data_plan.PART_SEGMENTS, 5], ids=["epochs of one part", "of several"])
def part_segments(request, monkeypatch):
    monkeypatch.setattr(data_plan, "PART_SEGMENTS", request.param)
    return request.param


@pytest.mark.parametrize("lengths", [(5, 1, 7, 30), (1,), (1,) * 9, (64, 64), (3, 200)])
@pytest.mark.parametrize(
    ("segment", "window", "later", "cut_at"),
    [(4, 8, None, 1), (4, 8, None, 2), (1, 1, None, 2), (32, 16, 1, 8), (7, 1000, None, 1)],
)
def test_each_epoch_has_each_row_once(lengths, segment, window, later, cut_at, part_segments):
    plan = StreamPlan(
        episodes(*lengths), seed=3, segment_rows=segment, window_rows=window, cut_at=cut_at, later_segment_rows=later
    )
    n = plan.rows_per_epoch
    rows = read(plan, 0, 3 * n)
    for epoch in range(3):
        mine = rows[epoch * n : (epoch + 1) * n]
        assert {e for e, _, _ in mine} == {epoch}
        assert sorted(i for _, _, i in mine) == list(range(n))


@pytest.mark.parametrize(("cut", "later"), [(1, None), (3, None), (8, 1), (11, None), (50, 1)])
def test_reading_resumes_at_any_position(cut, later, part_segments):
    plan = StreamPlan(episodes(5, 1, 7, 30), seed=3, segment_rows=4, window_rows=10, later_segment_rows=later)
    whole = read(plan, 0, 2 * plan.rows_per_epoch)
    pieces = [row for a in range(0, len(whole), cut) for row in read(plan, a, min(a + cut, len(whole)))]
    assert pieces == whole


def test_row_order_is_stable_across_versions():
    plan = StreamPlan(episodes(5, 1, 7, 30, 200), seed=3, segment_rows=4, window_rows=10)
    rows = read(plan, 0, 2 * plan.rows_per_epoch) + read(mixture((5, 0.1, 0.7)), 0, 820)
    assert hashlib.sha256(repr(rows).encode()).hexdigest().startswith("5097483d8feb9fde")
    assert plan.identity()["parts_of_epoch"] == [1]
    orders = [StreamPlan(plan.episodes, seed=seed, segment_rows=4, window_rows=10) for seed in (0, 1)]
    assert len({tuple(i for *_, i in read(p, e * 243, e * 243 + 243)) for p in orders for e in range(3)}) == 6


def test_segments_are_cut_at_key_frames(part_segments):
    lengths = (5, 1, 7, 30, 200)
    plan = StreamPlan(episodes(*lengths), seed=3, segment_rows=8, window_rows=10**6, cut_at=4)
    begins = np.cumsum(lengths) - lengths
    found = set()
    for epoch in range(8):
        first = epoch * plan.rows_per_epoch
        for window in plan.slices(first, first + plan.rows_per_epoch):
            offset = window.start - begins[window.episode]
            assert not (offset % 4).any()
            found |= {*offset.tolist()}
    assert found > {0, 4, 8, 196}  # other places in other epochs
    # A run that was cut otherwise is refused; segments that are no multiple, or single rows, are cut anywhere.
    as_ever = StreamPlan(episodes(*lengths), seed=3, segment_rows=8, window_rows=10**6).identity()
    assert plan.identity() == {**as_ever, "cut_at": 4}
    for segment, seed in ((7, 3), (1, 3), (8, None)):
        plans = [
            StreamPlan(episodes(*lengths), seed=seed, segment_rows=segment, window_rows=64, cut_at=n) for n in (1, 4)
        ]
        assert plans[0].identity() == plans[1].identity()


def test_epoch_parts_sample_every_episode(monkeypatch):
    lengths = [100] * 50 + [8] * 50
    whole = StreamPlan(episodes(*lengths), seed=0, segment_rows=4, window_rows=40).identity()
    monkeypatch.setattr(data_plan, "PART_SEGMENTS", 200)
    plan = StreamPlan(episodes(*lengths), seed=0, segment_rows=4, window_rows=40)
    parts = plan._sources[0].parts_of_epoch
    assert parts == 8 and plan.identity() == {**whole, "parts_of_epoch": [8]}
    for epoch in range(2):
        bounds = plan._sources[0]._part_bounds(epoch) + epoch * plan.rows_per_epoch
        assert np.diff(bounds).max() < 1.1 * plan.rows_per_epoch / parts
        for first, last in zip(bounds, bounds[1:], strict=False):
            found = Counter(int(s.episode[p]) for s in plan.slices(first, last) for p in s.rows()[0])
            assert set(range(50)) <= found.keys()
            assert max(found[e] for e in range(50)) <= 4 * (25 // parts + 2)
            assert sum(found[e] for e in range(50, 100)) == pytest.approx(50, abs=45)


def plan_within(folder, stages, cpu_s, mb):
    """Plan the datasets of a folder, in so many seconds and megabytes."""
    for stage in stages:
        found = measure(stage, folder)
        # Arrow parses one footer of LeRobot's layout into 200 MB.
        most_mb = 2 * mb if stage == "metadata" else mb
        assert found["cpu_s"] < cpu_s and found["peak_mb"] < most_mb, (stage, found)


@pytest.mark.parametrize(
    ("number", "cpu_s", "mb"), [(2000, 8, 100), pytest.param(100_000, 25, 250, marks=pytest.mark.slow)]
)
def test_large_dataset_is_planned_within_time_and_memory(tmp_path, number, cpu_s, mb):
    """Of 100 000 episodes the shortest segments are cut, 15 million in an epoch."""
    make(tmp_path / "dataset", number)
    plan_within(tmp_path, STAGES, cpu_s, mb)


def test_mixture_of_many_datasets_is_planned_within_time(tmp_path):
    for number in range(6):
        make(tmp_path / f"dataset-{number:02d}", 100, number)
    plan_within(tmp_path, ("metadata", "plan", "coordinator"), 8, 100)


def test_mixture_members_share_segment_budget(monkeypatch):
    def mixture():
        parts = [episodes(*[100] * 20, dataset=d) for d in range(3)] + [episodes(9, 14, dataset=3)]
        return StreamPlan(together(*parts), seed=0, segment_rows=4, window_rows=1, weights=[1, 2, 1, 0.02])

    whole = mixture().identity()
    assert whole["parts_of_epoch"] == [1, 1, 1, 1]
    # 520 segments in each of the large datasets, 7 in the small one.
    monkeypatch.setattr(data_plan, "PART_SEGMENTS", 3 * 520 + 7)
    assert mixture().identity() == whole
    monkeypatch.setattr(data_plan, "PART_SEGMENTS", 600)
    plan = mixture()
    assert plan.identity() == whole | {"parts_of_epoch": [3, 3, 3, 1]}
    rows = read(plan, 0, 2 * plan.rows_per_epoch)
    for dataset, size in enumerate((2000, 2000, 2000, 23)):
        index = [i for _, d, i in rows if d == dataset]
        for first in range(0, len(index) - size + 1, size):
            assert sorted(index[first : first + size]) == list(range(size))
    assert sum(len(source._cached[1][0][0]) for source in plan._sources) <= 600 * 1.05


def test_fair_share():
    assert fair_share([5, 5], 10) == 10 and fair_share([3], 10) == 10 and fair_share([30], 10) == 10
    assert fair_share([1, 30, 30], 11) == 5 and fair_share([4, 4, 4], 6) == 2 and fair_share([1, 1, 1], 2) == 1


def test_single_row_segments_shuffle_later_epochs_globally():
    eps = episodes(*[100] * 50)
    plan = StreamPlan(eps, seed=0, segment_rows=10, window_rows=100, later_segment_rows=1)
    as_ever = StreamPlan(eps, seed=0, segment_rows=10, window_rows=100)
    assert read(plan, 0, 5000) == read(as_ever, 0, 5000)
    for epoch in (1, 2):
        index = np.array([i for _, _, i in read(plan, epoch * 5000, (epoch + 1) * 5000)])
        # Of a window, as many episodes as of 100 rows drawn from all.
        found = np.mean([len(np.unique(window // 100)) for window in index.reshape(50, 100)])
        assert found == pytest.approx(50 * (1 - (1 - 1 / 50) ** 100), abs=0.8)
        # And no row follows its neighbour more often than by chance.
        assert (np.diff(index) == 1).sum() < 8
    assert plan.identity() == as_ever.identity() | {"later_epochs": {"segment_rows": 1, "parts_of_epoch": [1]}}


def test_window_mixes_episodes_in_contiguous_runs():
    plan = StreamPlan(episodes(*[100] * 50), seed=0, segment_rows=10, window_rows=100)
    (window,) = plan.slices(100, 200)
    assert len(set(window.episode)) >= 7  # about 10 places of 50 episodes
    assert (window.end - window.start).max() == 10
    index = window.rows()[1]
    assert (np.diff(index) == 1).mean() < 0.2


def test_identity_differs_between_plans():
    def plan(**changes):
        options = {"seed": 0, "segment_rows": 4, "window_rows": 8, **changes}
        return StreamPlan(options.pop("eps", episodes(5, 6)), **options).identity()

    assert plan() == plan()
    for change in ({"seed": 1}, {"window_rows": 9}, {"eps": episodes(6, 5)}, {"eps": episodes(5, 6, dataset=1)}):
        assert plan(**change) != plan()
    assert mixture((1, 1, 1)).identity() == mixture((2, 2, 2)).identity()
    assert mixture((1, 1, 1)).identity() != mixture((1, 1, 2)).identity() != mixture(None).identity()
    assert weighted().identity() == weighted().identity() != weighted((1.0, *WEIGHTS[1:])).identity()
    assert weighted([1.0] * 6).identity().keys() == weighted().identity().keys() > plan().keys()


def test_evenly_spaced():
    assert evenly_spaced(11, 3).tolist() == [0, 5, 10] and evenly_spaced(3, 9).tolist() == [0, 1, 2]
    assert evenly_spaced(7, 1).tolist() == [0] and evenly_spaced(1, 1).tolist() == [0]
    assert evenly_spaced(0, 3).tolist() == [] and evenly_spaced(0, 3).dtype == np.int64


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match="no episodes"):
        StreamPlan(episodes(), seed=0, segment_rows=4, window_rows=8)
    for segment, window in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="must be positive"):
            StreamPlan(episodes(3), seed=0, segment_rows=segment, window_rows=window)
    for unordered in ({"weights": [1]}, {"episode_weights": np.ones(1)}, {"later_segment_rows": 1}):
        with pytest.raises(ValueError, match="no stored order; give a shuffle seed"):
            StreamPlan(episodes(3), seed=None, segment_rows=1, window_rows=8, **unordered)
    with pytest.raises(ValueError, match="2 weights for 1 datasets"):
        StreamPlan(episodes(3), seed=0, segment_rows=1, window_rows=8, weights=[1, 1])


@pytest.mark.parametrize("asked", [1, 16, 4096])
@pytest.mark.parametrize("fitting", [0, 33, 288, 10**6])
def test_window_and_segment_sizes(asked, fitting):
    window, segment = window_and_segment(asked, fitting, 16, 32)
    assert -(-window // segment) >= min(32, asked) and 1 <= segment <= 16
    assert window <= max(fitting, 32) and window <= asked and window % 16 * (window // 17) == 0
    at_key_frames = window_and_segment(asked, fitting, 16, 32, 2)
    assert at_key_frames == (window, segment - segment % 2 if segment > 1 else 1)
    window, segment = window_and_segment(asked, fitting, 16, None)
    assert segment == 16 and 1 <= window <= max(1, fitting)
    # Whole segments of 16 fit 300 rows 18 times; segments of 9 rows are cut at key frames, every 4.
    assert window_and_segment(4096, 300, 16, 32) == (288, 9) and window_and_segment(4096, 300, 16, 32, 4) == (288, 8)


# ---- mixtures -------------------------------------------------------------------------------------------------------

LENGTHS = [(40, 25, 35), (7, 3), (300,)]  # of three datasets: 100, 10 and 300 rows


def three_datasets():
    return together(*(episodes(*lengths, dataset=d) for d, lengths in enumerate(LENGTHS)))


def mixture(weights, seed=0, window=64):
    return StreamPlan(three_datasets(), seed=seed, segment_rows=8, window_rows=window, weights=weights)


@pytest.mark.parametrize("weights", [(1, 1, 1), (100, 10, 300), (5, 0.1, 0.7), (1, 100, 100)])
def test_mixture_epochs_match_weights(weights):
    plan = mixture(weights)
    assert plan.rows_per_epoch == 410
    for epoch in range(4):
        rows = read(plan, epoch * 410, (epoch + 1) * 410)
        found = Counter(d for _, d, _ in rows)
        assert {e for e, _, _ in rows} == {epoch}
        assert [found[d] for d in range(3)] == plan.rows_per_source
        np.testing.assert_allclose(plan.rows_per_source, 410 * np.array(weights) / sum(weights), atol=1)


@pytest.mark.parametrize("weights", [(100, 10, 300), (5, 0.1, 0.7), (2, 9, 1)])
def test_mixture_repeats_rows_evenly(weights, part_segments):
    """At the end of every window no frame is ahead of another of its dataset by more than one."""
    plan = mixture(weights)
    seen = {(d, i): 0 for d, lengths in enumerate(LENGTHS) for i in range(sum(lengths))}
    position = 0
    for window in plan.slices(0, 7 * plan.rows_per_epoch):
        for part, index in zip(*window.rows(), strict=True):
            seen[int(plan.episodes.dataset_index[window.episode[part]]), int(index)] += 1
        position += window.hi - window.lo
        for dataset in range(3):
            counts = [n for (d, _), n in seen.items() if d == dataset]
            assert max(counts) - min(counts) <= 1
    assert position == sum(seen.values()) == 7 * 410
    assert weights != (100, 10, 300) or set(seen.values()) == {7}


def test_mixture_windows_match_weights():
    plan = mixture((2, 1, 1), window=64)
    for window in plan.slices(0, 820):
        found = Counter(plan.episodes.dataset_index[window.episode[window.rows()[0]]].tolist())
        length = window.hi - window.lo
        for dataset, share in enumerate((0.5, 0.25, 0.25)):
            assert abs(found[dataset] - share * length) < 2
    # Within a window rows are permuted together: a batch is not one dataset's rows, then another's.
    first = [d for _, d, _ in read(plan, 0, 64)]
    assert len({tuple(sorted(set(first[i : i + 16]))) for i in range(0, 64, 16)} - {(0, 1, 2)}) <= 1


@pytest.mark.parametrize("cut", [7, 64])
def test_mixture_resumes_at_any_position_in_another_process(cut, part_segments):
    plan = mixture((5, 0.1, 0.7))
    whole = read(plan, 0, 820)
    copy = pickle.loads(pickle.dumps(plan))
    assert [row for a in range(0, 820, cut) for row in read(copy, a, min(a + cut, 820))] == whole
    assert read(mixture((5, 0.1, 0.7), seed=1), 0, 820) != whole
    assert read(mixture((5, 0.1, 0.7)), 410 * 10**9, 410 * 10**9 + 5) != whole[:5]  # far away is as near


@pytest.mark.parametrize("counts", [(3, 2, 1), (7, 7, 7), (2**40 + 1, 2**40, 5), (1, 1000)])
def test_interleaver_is_exact_for_large_counts(counts):
    dealer, total = Interleaver(counts), sum(counts)
    for position in (1, 2, 5, total // 2, total - 1):
        dealt = dealer.before(position)
        came = max((Fraction(2 * d - 1, n), source) for source, (d, n) in enumerate(zip(dealt, counts, strict=True)))
        to_come = [
            (Fraction(2 * d + 1, n), source) for source, (d, n) in enumerate(zip(dealt, counts, strict=True)) if d < n
        ]
        assert sum(dealt) == position and came < min(to_come)


@pytest.mark.parametrize("counts", [(10,), (7, 1), (5, 5, 5), (1, 100, 3, 29), (1,) * 30, (64, 32, 16, 8, 4, 2, 1)])
def test_interleaver_advances_by_one_and_matches_shares(counts):
    dealer, total = Interleaver(counts), sum(counts)
    before = [0] * len(counts)
    for position in range(total + 1):
        now = dealer.before(position)
        assert sum(now) == position and all(0 <= b - a <= 1 for a, b in zip(before, now, strict=True))
        assert np.abs(np.array(now) - np.array(counts) * position / total).max() < max(1, np.log2(len(counts)))
        before = now
    assert before == list(counts)


# ---- weighted episodes ----------------------------------------------------------------------------------------------

WEIGHTS = (0.3, 1.0, 2.5, 1 / 3, 0.05, 3.0)


def weighted(weights=WEIGHTS, lengths=(5, 1, 7, 30, 12, 4), **options):
    chosen = {"seed": 3, "segment_rows": 4, "window_rows": 10, **options}
    return StreamPlan(episodes(*lengths), episode_weights=np.array(weights), **chosen)


def test_weighted_rows_occur_by_weight(part_segments):
    """After any number of epochs never one off; and the plan knows beforehand how often exactly."""
    plan, position, seen = weighted(), 0, Counter()
    of_row = np.repeat(np.arange(6), plan.episodes.length).tolist()
    for epoch in range(41):
        number, begin, end = plan.epoch_at(position)
        assert (number, begin) == (epoch, position)
        rows = read(plan, begin, end)
        assert {e for e, _, _ in rows} == {epoch}
        half = seen + Counter(i for _, _, i in rows[: len(rows) // 2])
        least, most = plan.occurrences((begin + begin + len(rows)) // 2)
        assert all(least[e] <= half[i] <= most[e] for i, e in enumerate(of_row))
        seen += Counter(i for _, _, i in rows)
        exactly, same = plan.occurrences(end)
        assert (exactly == same).all() and [seen[i] for i in range(len(of_row))] == exactly[of_row].tolist()
        for i, e in enumerate(of_row):
            assert abs(seen[i] - (epoch + 1) * Fraction(WEIGHTS[e])) < 1
        position = end
    assert position == pytest.approx(41 * plan.rows_per_epoch, rel=0.02)
    assert [seen[i] for i in (5, 58)] == [41, 123]  # whole weights: the same in every epoch
    assert read(plan, 0, position) == read(pickle.loads(pickle.dumps(plan)), 0, position)
    assert [row for a in range(0, 300, 7) for row in read(plan, a, min(a + 7, 300))] == read(plan, 0, 300)


def test_weighted_epochs_have_similar_lengths():
    plan = weighted([0.4] * 100 + [1.3] * 50, [10] * 150)
    ends = np.array([plan.epoch_at(e * plan.rows_per_epoch + plan.rows_per_epoch // 2) for e in range(30)])
    assert ends[:, 0].tolist() == list(range(30))
    assert np.abs(np.diff(ends[:, 1:]) - plan.rows_per_epoch).max() <= 0.05 * plan.rows_per_epoch
    rare = weighted([0.03], [8])  # most epochs of it have no rows at all
    numbers = [rare.epoch_at(position)[0] for position in range(0, 80, 8)]
    ends = [rare.begin(epoch + 1) for epoch in range(numbers[-1] + 1)]
    assert (
        epoch_ends(rare, 80) == ends
        and epoch_ends(rare, 73) == ends
        and epoch_ends(rare, 72) == ends[: numbers[-2] + 1]
    )
    assert ends.count(0) == numbers[0] and ends.count(72) == numbers[-1] - numbers[-2]
    assert np.diff(numbers).min() >= 33 and [e for e, _, _ in read(rare, 0, 80)] == np.repeat(numbers, 8).tolist()


def test_weighted_episodes_in_mixture(part_segments):
    """Datasets have their shares as ever; within a dataset, its own epochs follow the weights of its episodes."""
    drawn = three_datasets()
    weight = np.array([1, 0.25, 2.5, 1, 1, 0.5])
    options = {"seed": 0, "segment_rows": 8, "window_rows": 64, "weights": (1, 1, 2)}
    plan = StreamPlan(drawn, episode_weights=weight, **options)
    assert plan.rows_per_epoch == round(40 + 25 / 4 + 2.5 * 35 + 10 + 150) == sum(plan.rows_per_source)
    rows = read(plan, 0, 9 * plan.rows_per_epoch)
    seen, last = Counter((d, i) for _, d, i in rows), [sum(d == n for _, d, _ in rows) for n in range(3)]
    assert last == [9 * n for n in plan.rows_per_source]
    least, most = plan.occurrences(9 * plan.rows_per_epoch)
    for e, (d, start, length) in enumerate(zip(drawn.dataset_index, drawn.start, drawn.length, strict=True)):
        counts = {seen[int(d), int(i)] for i in range(start, start + length)}
        assert min(counts) >= least[e] and max(counts) <= most[e]
        epochs = last[d] / (weight * drawn.length)[drawn.dataset_index == d].sum()
        assert all(abs(n - epochs * weight[e]) < 1 + weight[e] for n in counts)
    assert (most > least).any() and (least > 1).any()


@pytest.mark.parametrize("window", [1, 8, 20])
def test_mixture_occurrences_are_bounded_at_any_position(window):
    """A source's epoch ends within a window: some of its rows are still to come, and others came once more already."""
    drawn = together(episodes(9, 14, 11, dataset=0), episodes(22, 9, dataset=1))
    plan = StreamPlan(drawn, seed=1, segment_rows=4, window_rows=window, weights=[3, 1])
    rows, seen = read(plan, 0, 4 * plan.rows_per_epoch), Counter()
    for position, (_, dataset, index) in enumerate([*rows, (0, 0, 0)]):
        least, most = plan.occurrences(position)
        assert (most - least <= 2).all()
        for d, start, length, a, b in zip(drawn.dataset_index, drawn.start, drawn.length, least, most, strict=True):
            assert all(a <= seen[int(d), i] <= b for i in range(start, start + length))
        seen[dataset, index] += 1
    assert not plan.occurrences(0)[1].any()


def test_invalid_shares_are_refused():
    assert apportion(10, [1, 1, 1]) == [4, 3, 3]
    for weights in ([1, 0], [1, -1], [1, float("nan")], [1, float("inf")]):
        with pytest.raises(ValueError, match="expected positive numbers"):
            apportion(10, weights)
    with pytest.raises(ValueError, match="none would come from dataset_index 1"):
        apportion(10, [1, 1e-6])
