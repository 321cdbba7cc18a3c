"""Plans against an exhaustive oracle: each epoch has each row once, weights and mixtures have their shares."""

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
    """Return (epoch, dataset, index) of stream positions [first, last)."""
    rows = []
    for s in plan.slices(first, last):
        part, index = s.rows()
        datasets = plan.episodes.dataset_index[s.episode[part]].tolist()
        rows += [(s.epoch, dataset, i) for dataset, i in zip(datasets, index.tolist(), strict=True)]
    return rows


@pytest.fixture(params=[data_plan.PART_SEGMENTS, 5], ids=["epochs of one part", "of several"])
def part_segments(request, monkeypatch):
    monkeypatch.setattr(data_plan, "PART_SEGMENTS", request.param)
    return request.param


def assert_each_row_once(plan):
    n = plan.rows_per_epoch
    rows = read(plan, 0, 3 * n)
    for epoch in range(3):
        epochs, _, index = zip(*rows[epoch * n : (epoch + 1) * n], strict=True)
        assert set(epochs) == {epoch} and sorted(index) == list(range(n))
    return rows


@pytest.mark.parametrize("lengths", [(5, 1, 7, 30), (1,), (1,) * 9, (64, 64), (3, 200)])
@pytest.mark.parametrize(
    ("segment", "window", "later", "cut_at"),
    [(4, 8, None, 1), (4, 8, None, 2), (1, 1, None, 2), (32, 16, 1, 8), (7, 1000, None, 1)],
)
def test_each_epoch_has_each_row_once(lengths, segment, window, later, cut_at, part_segments):
    options = {"segment_rows": segment, "window_rows": window, "cut_at": cut_at, "later_segment_rows": later}
    plan = StreamPlan(episodes(*lengths), seed=3, **options)
    assert plan.rows_per_epoch == sum(lengths)
    assert_each_row_once(plan)


@pytest.mark.parametrize(("cut", "later"), [(1, None), (3, None), (8, 1), (11, None), (50, 1)])
def test_reading_resumes_at_any_position(cut, later, part_segments):
    plan = StreamPlan(episodes(5, 1, 7, 30), seed=3, segment_rows=4, window_rows=10, later_segment_rows=later)
    expected = read(plan, 0, 2 * plan.rows_per_epoch)
    pieces = [row for a in range(0, len(expected), cut) for row in read(plan, a, min(a + cut, len(expected)))]
    assert pieces == expected


def test_row_order_is_stable_across_versions():
    plan = StreamPlan(episodes(5, 1, 7, 30, 200), seed=3, segment_rows=4, window_rows=10)
    rows = read(plan, 0, 2 * plan.rows_per_epoch) + read(mixture((5, 0.1, 0.7)), 0, 820)
    assert hashlib.sha256(repr(rows).encode()).hexdigest().startswith("5097483d8feb9fde")
    assert plan.identity()["parts_of_epoch"] == [1]
    orders = [StreamPlan(plan.episodes, seed=seed, segment_rows=4, window_rows=10) for seed in (0, 1)]
    assert len({tuple(i for *_, i in read(p, e * 243, e * 243 + 243)) for p in orders for e in range(3)}) == 6


def test_segments_are_cut_at_key_frames(part_segments):
    lengths = (5, 1, 7, 30, 200)

    def plan(cut_at, segment=8, seed=3, window=64):
        options = {"segment_rows": segment, "window_rows": window, "cut_at": cut_at}
        return StreamPlan(episodes(*lengths), seed=seed, **options)

    cut = plan(4, window=10**6)
    begins = np.cumsum(lengths) - lengths
    offsets = set()
    for window in cut.slices(0, 8 * cut.rows_per_epoch):
        offsets |= {*(window.start - begins[window.episode]).tolist()}
    assert not any(offset % 4 for offset in offsets)
    assert offsets > {0, 4, 8, 196}  # other places in other epochs
    # Another cut is another identity, unless segments are single rows or no multiple of it.
    assert plan(4).identity() == {**plan(1).identity(), "cut_at": 4}
    for segment, seed in ((7, 3), (1, 3), (8, None)):
        assert plan(1, segment, seed).identity() == plan(4, segment, seed).identity()


def test_epoch_parts_sample_every_episode(monkeypatch):
    lengths = [100] * 50 + [8] * 50
    undivided = StreamPlan(episodes(*lengths), seed=0, segment_rows=4, window_rows=40).identity()
    monkeypatch.setattr(data_plan, "PART_SEGMENTS", 200)
    plan = StreamPlan(episodes(*lengths), seed=0, segment_rows=4, window_rows=40)
    parts = plan._sources[0].parts_of_epoch
    assert parts == 8 and plan.identity() == {**undivided, "parts_of_epoch": [8]}
    for epoch in range(2):
        bounds = plan._sources[0]._part_bounds(epoch) + epoch * plan.rows_per_epoch
        assert np.diff(bounds).max() < 1.1 * plan.rows_per_epoch / parts
        for first, last in zip(bounds, bounds[1:], strict=False):
            counts = Counter(int(s.episode[p]) for s in plan.slices(first, last) for p in s.rows()[0])
            assert set(range(50)) <= counts.keys()
            assert max(counts[e] for e in range(50)) <= 4 * (25 // parts + 2)
            assert sum(counts[e] for e in range(50, 100)) == pytest.approx(50, abs=45)


@pytest.mark.parametrize(
    ("sizes", "stages", "cpu_s", "mb"),
    [
        ([2000], STAGES, 8, 100),
        pytest.param([100_000], STAGES, 25, 250, marks=pytest.mark.slow),
        ([100] * 6, ("metadata", "plan", "coordinator"), 8, 100),
    ],
)
def test_large_datasets_are_planned_within_time_and_memory(tmp_path, sizes, stages, cpu_s, mb):
    """100 000 episodes are cut into the shortest segments, 15 million in an epoch."""
    for number, size in enumerate(sizes):
        make(tmp_path / f"dataset-{number:02d}", size, number)
    for stage in stages:
        costs = measure(stage, tmp_path)
        # Arrow parses one footer of LeRobot's layout into 200 MB.
        max_mb = 2 * mb if stage == "metadata" else mb
        assert costs["cpu_s"] < cpu_s and costs["peak_mb"] < max_mb, (stage, costs)


def test_mixture_members_share_segment_budget(monkeypatch):
    def mixture():
        parts = [episodes(*[100] * 20, dataset=d) for d in range(3)] + [episodes(9, 14, dataset=3)]
        return StreamPlan(together(*parts), seed=0, segment_rows=4, window_rows=1, weights=[1, 2, 1, 0.02])

    undivided = mixture().identity()
    assert undivided["parts_of_epoch"] == [1, 1, 1, 1]
    # 520 segments in each of the large datasets, 7 in the small one.
    monkeypatch.setattr(data_plan, "PART_SEGMENTS", 3 * 520 + 7)
    assert mixture().identity() == undivided
    monkeypatch.setattr(data_plan, "PART_SEGMENTS", 600)
    plan = mixture()
    assert plan.identity() == undivided | {"parts_of_epoch": [3, 3, 3, 1]}
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
    segmented = StreamPlan(eps, seed=0, segment_rows=10, window_rows=100)
    assert read(plan, 0, 5000) == read(segmented, 0, 5000)
    for epoch in (1, 2):
        index = np.array([i for _, _, i in read(plan, epoch * 5000, (epoch + 1) * 5000)])
        # A window has as many episodes as 100 rows drawn from all.
        episodes_per_window = np.mean([len(np.unique(window // 100)) for window in index.reshape(50, 100)])
        assert episodes_per_window == pytest.approx(50 * (1 - (1 - 1 / 50) ** 100), abs=0.8)
        # And no row follows its neighbour more often than by chance.
        assert (np.diff(index) == 1).sum() < 8
    assert plan.identity() == segmented.identity() | {"later_epochs": {"segment_rows": 1, "parts_of_epoch": [1]}}


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"episodes": episodes()}, "no episodes"),
        ({"segment_rows": 0}, "must be positive"),
        ({"window_rows": 0}, "must be positive"),
        ({"seed": None, "weights": [1]}, "no stored order; give a shuffle seed"),
        ({"seed": None, "episode_weights": np.ones(1)}, "no stored order; give a shuffle seed"),
        ({"seed": None, "later_segment_rows": 1}, "no stored order; give a shuffle seed"),
        ({"weights": [1, 1]}, "2 weights for 1 datasets"),
    ],
)
def test_invalid_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        StreamPlan(**{"episodes": episodes(3), "seed": 0, "segment_rows": 1, "window_rows": 8, **options})


@pytest.mark.parametrize("wanted_rows", [1, 16, 4096])
@pytest.mark.parametrize("fitting", [0, 33, 288, 10**6])
def test_window_and_segment_sizes(wanted_rows, fitting):
    window, segment = window_and_segment(wanted_rows, fitting, 16, 32)
    assert -(-window // segment) >= min(32, wanted_rows) and 1 <= segment <= 16
    assert window <= max(fitting, 32) and window <= wanted_rows and window % 16 * (window // 17) == 0
    at_key_frames = window_and_segment(wanted_rows, fitting, 16, 32, 2)
    assert at_key_frames == (window, segment - segment % 2 if segment > 1 else 1)
    window, segment = window_and_segment(wanted_rows, fitting, 16, None)
    assert segment == 16 and 1 <= window <= max(1, fitting)
    # Whole segments of 16 fit 300 rows 18 times; segments of 9 rows are cut at key frames, every 4.
    assert window_and_segment(4096, 300, 16, 32) == (288, 9) and window_and_segment(4096, 300, 16, 32, 4) == (288, 8)


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
        counts = Counter(d for _, d, _ in rows)
        assert {e for e, _, _ in rows} == {epoch}
        assert [counts[d] for d in range(3)] == plan.rows_per_source
        np.testing.assert_allclose(plan.rows_per_source, 410 * np.array(weights) / sum(weights), atol=1)


@pytest.mark.parametrize("weights", [(100, 10, 300), (5, 0.1, 0.7), (2, 9, 1)])
def test_mixture_repeats_rows_evenly(weights, part_segments):
    """At the end of every window no frame is ahead of another of its dataset by more than one."""
    plan = mixture(weights)
    times = {(d, i): 0 for d, lengths in enumerate(LENGTHS) for i in range(sum(lengths))}
    position = 0
    for window in plan.slices(0, 7 * plan.rows_per_epoch):
        for part, index in zip(*window.rows(), strict=True):
            times[int(plan.episodes.dataset_index[window.episode[part]]), int(index)] += 1
        position += window.hi - window.lo
        for dataset in range(3):
            dataset_times = [n for (d, _), n in times.items() if d == dataset]
            assert max(dataset_times) - min(dataset_times) <= 1
    assert position == sum(times.values()) == 7 * 410
    assert weights != (100, 10, 300) or set(times.values()) == {7}


def test_mixture_windows_match_weights():
    plan = mixture((2, 1, 1), window=64)
    for window in plan.slices(0, 820):
        counts = Counter(plan.episodes.dataset_index[window.episode[window.rows()[0]]].tolist())
        length = window.hi - window.lo
        for dataset, share in enumerate((0.5, 0.25, 0.25)):
            assert abs(counts[dataset] - share * length) < 2
    # Within a window rows are permuted together: a batch is not one dataset's rows, then another's.
    first = [d for _, d, _ in read(plan, 0, 64)]
    assert len({tuple(sorted(set(first[i : i + 16]))) for i in range(0, 64, 16)} - {(0, 1, 2)}) <= 1


@pytest.mark.parametrize("cut", [7, 64])
def test_mixture_resumes_at_any_position_in_another_process(cut, part_segments):
    plan = mixture((5, 0.1, 0.7))
    expected = read(plan, 0, 820)
    copy = pickle.loads(pickle.dumps(plan))
    assert [row for a in range(0, 820, cut) for row in read(copy, a, min(a + cut, 820))] == expected
    assert read(mixture((5, 0.1, 0.7), seed=1), 0, 820) != expected
    assert read(mixture((5, 0.1, 0.7)), 410 * 10**9, 410 * 10**9 + 5) != expected[:5]  # far positions need no search


@pytest.mark.parametrize("counts", [(3, 2, 1), (7, 7, 7), (2**40 + 1, 2**40, 5), (1, 1000)])
def test_interleaver_is_exact_for_large_counts(counts):
    total = sum(counts)
    for position in (1, 2, 5, total // 2, total - 1):
        progress = list(zip(Interleaver(counts).before(position), counts, strict=True))
        last = max((Fraction(2 * passed - 1, n), source) for source, (passed, n) in enumerate(progress))
        following = min(
            (Fraction(2 * passed + 1, n), source) for source, (passed, n) in enumerate(progress) if passed < n
        )
        assert sum(passed for passed, _ in progress) == position and last < following


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


WEIGHTS = (0.3, 1.0, 2.5, 1 / 3, 0.05, 3.0)


def weighted(weights=WEIGHTS, lengths=(5, 1, 7, 30, 12, 4), **options):
    chosen = {"seed": 3, "segment_rows": 4, "window_rows": 10, **options}
    return StreamPlan(episodes(*lengths), episode_weights=np.array(weights), **chosen)


def test_weighted_rows_occur_by_weight(part_segments):
    """Counts are within one of weight x epochs after each epoch, and equal to `occurrences`."""
    plan, position, times = weighted(), 0, Counter()
    episode_of_row = np.repeat(np.arange(6), plan.episodes.length).tolist()
    for epoch in range(41):
        number, begin, end = plan.epoch_at(position)
        assert (number, begin) == (epoch, position)
        rows = read(plan, begin, end)
        assert {e for e, _, _ in rows} == {epoch}
        half = times + Counter(i for _, _, i in rows[: len(rows) // 2])
        low, high = plan.occurrences((begin + begin + len(rows)) // 2)
        assert all(low[e] <= half[i] <= high[e] for i, e in enumerate(episode_of_row))
        times += Counter(i for _, _, i in rows)
        exact, same = plan.occurrences(end)
        assert (exact == same).all()
        assert [times[i] for i in range(len(episode_of_row))] == exact[episode_of_row].tolist()
        for i, e in enumerate(episode_of_row):
            assert abs(times[i] - (epoch + 1) * Fraction(WEIGHTS[e])) < 1
        position = end
    assert position == pytest.approx(41 * plan.rows_per_epoch, rel=0.02)
    assert [times[i] for i in (5, 58)] == [41, 123]  # whole weights: the same in every epoch
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
    assert epoch_ends(rare, 80) == epoch_ends(rare, 73) == ends
    assert epoch_ends(rare, 72) == ends[: numbers[-2] + 1]
    assert ends.count(0) == numbers[0] and ends.count(72) == numbers[-1] - numbers[-2]
    assert np.diff(numbers).min() >= 33 and [e for e, _, _ in read(rare, 0, 80)] == np.repeat(numbers, 8).tolist()


def test_weighted_episodes_in_mixture(part_segments):
    """Datasets have their shares; within a dataset, rows follow the weights of its episodes."""
    members = three_datasets()
    weight = np.array([1, 0.25, 2.5, 1, 1, 0.5])
    options = {"seed": 0, "segment_rows": 8, "window_rows": 64, "weights": (1, 1, 2)}
    plan = StreamPlan(members, episode_weights=weight, **options)
    assert plan.rows_per_epoch == round(40 + 25 / 4 + 2.5 * 35 + 10 + 150) == sum(plan.rows_per_source)
    rows = read(plan, 0, 9 * plan.rows_per_epoch)
    times, rows_of_dataset = Counter((d, i) for _, d, i in rows), [sum(d == n for _, d, _ in rows) for n in range(3)]
    assert rows_of_dataset == [9 * n for n in plan.rows_per_source]
    low, high = plan.occurrences(9 * plan.rows_per_epoch)
    for e, (d, start, length) in enumerate(zip(members.dataset_index, members.start, members.length, strict=True)):
        counts = {times[int(d), int(i)] for i in range(start, start + length)}
        assert min(counts) >= low[e] and max(counts) <= high[e]
        epochs = rows_of_dataset[d] / (weight * members.length)[members.dataset_index == d].sum()
        assert all(abs(n - epochs * weight[e]) < 1 + weight[e] for n in counts)
    assert (high > low).any() and (low > 1).any()


@pytest.mark.parametrize("window", [1, 8, 20])
def test_mixture_occurrences_are_bounded_at_any_position(window):
    """Also where the epoch of a member ends within a window."""
    members = together(episodes(9, 14, 11, dataset=0), episodes(22, 9, dataset=1))
    plan = StreamPlan(members, seed=1, segment_rows=4, window_rows=window, weights=[3, 1])
    rows, times = read(plan, 0, 4 * plan.rows_per_epoch), Counter()
    for position, (_, dataset, index) in enumerate([*rows, (0, 0, 0)]):
        low, high = plan.occurrences(position)
        assert (high - low <= 2).all()
        for d, start, length, a, b in zip(members.dataset_index, members.start, members.length, low, high, strict=True):
            assert all(a <= times[int(d), i] <= b for i in range(start, start + length))
        times[dataset, index] += 1
    assert not plan.occurrences(0)[1].any()


@pytest.mark.parametrize("weights", [[1, 0], [1, -1], [1, float("nan")], [1, float("inf")], [1, 1e-6]])
def test_invalid_shares_are_refused(weights):
    assert apportion(10, [1, 1, 1]) == [4, 3, 3]
    with pytest.raises(ValueError, match="expected positive numbers|none would come from /data/b; raise"):
        apportion(10, weights, ["/data/a", "/data/b"])
