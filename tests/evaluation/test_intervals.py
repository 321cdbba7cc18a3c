"""Scores, intervals and comparisons against scipy, published numbers and nominal coverage."""

import itertools
import math
import re

import numpy as np
import pytest
from scipy import stats

from vla_finetuning.evaluation.intervals import (
    AT_END,
    ONCE,
    Comparison,
    compare,
    comparison_text,
    paired,
    score,
    share,
    wilson,
)


def test_wilson_interval_matches_literature_and_scipy():
    """Newcombe (1998), Statistics in Medicine 17, 857-872, table I, method 3."""
    for successes, episodes, expected in ((81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)),
                                          (0, 20, (0.0, 0.1611)), (1, 29, (0.0061, 0.1718))):  # fmt: skip
        assert wilson(successes, episodes) == pytest.approx(expected, abs=5e-5)
    assert wilson(0, 0) == (0.0, 1.0)
    for successes in range(8):
        expected = stats.binomtest(successes, 7).proportion_ci(0.95, method="wilson")
        assert wilson(successes, 7) == pytest.approx((expected.low, expected.high))


def line(number, success, error=None, state="s", at_end=None, **other):
    fields = {"condition": "plain", "task": "t", "episode": number, "seed": 1000 + number, "initial_state": None}
    fields["instruction"] = None if error else "go"
    if error is None:
        fields["initial_state"] = f"{state}{number}"
    at_end = success if at_end is None else at_end
    return {**fields, "success_once": success, "success_at_end": at_end, "error": error, **other}


def test_score_has_both_outcomes_and_counts_errors_both_ways():
    lines = [*(line(n, n < 5, at_end=n < 3) for n in range(6)), line(6, None, error="died")]
    result = score(lines)
    assert result == {
        **{"successes": 5, "episodes": 6, "interval": [wilson(5, 7)[0], wilson(6, 7)[1]]},
        **{"successes_at_end": 3, "interval_at_end": [wilson(3, 7)[0], wilson(4, 7)[1]], "errors": 1},
    }
    assert share(result) == (
        "5 of 6, 83.3 % (35.9 to 97.4); at the end 3 of 6, 50.0 % (15.8 to 84.2); 5 of 7 asked for: 1 ended in an error"
    )
    assert share(score(lines[:1])) == "1 of 1, 100.0 % (20.7 to 100.0); the same at the end"
    assert share(score([line(0, False)])) == "0 of 1, 0.0 % (0.0 to 79.3)"  # nor at the end
    assert share(score([])) == "none played" and score(lines[6:])["interval"] == [0.0, 1.0]


def test_episodes_of_one_scene_count_once():
    eight = [line(n, True, initial_state="s") for n in range(8)]
    result = score(eight)
    assert (result["successes"], result["episodes"], result["scenes"]) == (8, 8, 1)
    assert result["interval"] == list(wilson(1, 1)) and "; 8 episodes of 1 distinct scene" in share(result)
    assert score([*eight[:4], *(line(n, True, initial_state="s", task="u") for n in range(4))])["scenes"] == 2
    assert score([*eight[:4], *(line(n, True, initial_state="s", instruction="stay") for n in range(4))])["scenes"] == 2
    # Two of three from one state, and one from another that failed.
    mixed = [*(line(n, n > 0, initial_state="s") for n in range(3)), line(3, False)]
    assert score(mixed)["interval"] == list(wilson(2 / 3, 2))

    other = [{**episode, "success_once": False} for episode in eight]
    result = compare(paired(eight, other), ONCE)
    assert result.pairs == ((1.0, 0.0),) and result.p_value == 1 and result.verdict.startswith("cannot tell")
    assert compare(paired(eight, other), AT_END).pairs == ((1.0, 1.0),)
    assert "of 1 distinct scenes" in comparison_text(eight, other, "one", "other")
    # With distinct states the same outcomes are a difference.
    apart = compare(paired(*([line(n, success) for n in range(8)] for success in (True, False))), ONCE)
    assert apart.p_value == pytest.approx(2 / 2**8) and apart.better == (8, 0)


def test_comparison_counts_pairs_and_skips_errors():
    outcomes = [(True, True), (True, False), (False, True), (False, False), (True, False), (False, False)]
    a = [*(line(n, of_a, at_end=False) for n, (of_a, _) in enumerate(outcomes)), line(6, None, error="died")]
    b = [*(line(n, of_b, at_end=n < 1) for n, (_, of_b) in enumerate(outcomes)), line(6, True)]
    assert compare(paired(a, b), ONCE) == Comparison(tuple((float(x), float(y)) for x, y in outcomes))
    lines = comparison_text(a, b, "one", "other").splitlines()
    assert lines[0] == f"A  {share(score(a[:6]))}  one" and lines[1] == f"B  {share(score(b[:6]))}  other"
    numbers = [[float(n) for n in re.findall(r"[+-]?\d+\.?\d*", text)] for text in lines[2:]]
    # All outcomes of 3 coins are as uneven as 2 to 1, or more. B - A: -1 / 6, and (2 - 3) / 8 +- 1.96 sqrt((5 / 8 -
    # 1 / 64) / 8). At the end 1 / 6, and 1 / 8 +- 1.96 sqrt((3 / 8 - 1 / 64) / 8).
    assert numbers == [[1, 7, 1, 0], [6, 2, 1, 1], [-16.7, -66.6, 41.6], [], [6, 0, 1, 1], [16.7, -29.0, 54.0], []]
    assert len(comparison_text(a[:6], b[:6], "one", "other").splitlines()) == 8


def test_unpaired_episodes_are_refused():
    with pytest.raises(ValueError, match="not over the same list.*--seed"):
        paired([line(0, True)], [line(1, True)])
    for other in (line(0, True, state="other"), line(0, True, instruction="stay")):
        with pytest.raises(
            ValueError, match="episode 0 .seed 1000. began with another instruction or in another state"
        ):
            paired([line(0, True)], [other])


def compared(scenes, only_a, only_b):
    same = [(1.0, 1.0)] * (scenes - only_a - only_b)
    return Comparison((*[(1.0, 0.0)] * only_a, *[(0.0, 1.0)] * only_b, *same))


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 5), (0, 6), (1, 8), (10, 10), (0, 0), (9, 1)])
def test_mcnemar_equals_sign_test_and_determines_verdict(only_a, only_b):
    comparison = compared(60, only_a, only_b)
    n, minority = only_a + only_b, min(only_a, only_b)
    expected = min(1.0, 2 * sum(math.comb(n, k) for k in range(minority + 1)) / 2**n)
    assert comparison.p_value == pytest.approx(expected)
    verdict = "cannot tell" if expected >= 0.05 else ("A" if only_a > only_b else "B") + " succeeds more often"
    assert comparison.verdict.startswith(verdict)


def test_difference_interval_matches_bonett_price():
    """Bonett and Price (2012), equation 6, clipped to [-1, 1]."""
    for episodes, only_a, only_b in ((21, 1, 7), (3, 0, 3), (3, 3, 0), (1, 1, 0), (40, 0, 0), (60, 5, 12)):
        a, b = (only_a + 1) / (episodes + 2), (only_b + 1) / (episodes + 2)
        half = 1.959963985 * ((a + b - (b - a) ** 2) / (episodes + 2)) ** 0.5
        expected = [(only_b - only_a) / episodes, *np.clip([b - a - half, b - a + half], -1, 1)]
        actual = compared(episodes, only_a, only_b).difference
        assert actual == pytest.approx(expected, abs=1e-8)
    assert Comparison(()).difference == (0.0, -1.0, 1.0)


def test_difference_interval_has_nominal_coverage():
    """Coverage over all outcomes of 40 episodes, weighted by probability."""
    n, coverage = 40, []
    outcomes = [(only_a, only_b) for only_a in range(n + 1) for only_b in range(n + 1 - only_a)]
    estimate, low, high = np.array([compared(n, *outcome).difference for outcome in outcomes]).T
    assert (low <= estimate).all() and (estimate <= high).all()
    counts = np.array([(only_a, only_b, n - only_a - only_b) for only_a, only_b in outcomes])
    for a, b in itertools.product((0.02, 0.1, 0.2, 0.35), repeat=2):
        likely = stats.multinomial.pmf(counts, n, [a, b, 1 - a - b])
        coverage.append(likely[(low <= b - a) & (b - a <= high)].sum())
    assert min(coverage) > 0.935 and 0.945 < sum(coverage) / len(coverage) < 0.98
