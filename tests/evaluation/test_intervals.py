"""What is said of successes: against scipy and published numbers, and as often right as it says."""

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from vla_finetuning.evaluation.intervals import Comparison, compare, comparison_text, share, wilson


def test_wilson_against_the_papers_that_recommend_it():
    """Newcombe (1998), Statistics in Medicine 17, 857-872, table I, method 3."""
    for successes, episodes, expected in ((81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)),
                                          (0, 20, (0.0, 0.1611)), (1, 29, (0.0061, 0.1718))):  # fmt: skip
        assert wilson(successes, episodes) == pytest.approx(expected, abs=5e-5)
    assert wilson(0, 0) == (0.0, 1.0)
    assert share(57, 60) == "57 of 60, 95.0 % (86.3 to 98.3)" and share(0, 0) == "none played"


def line(number, success, error=None, state="s", **other):
    named = {"condition": "plain", "task": "t", "episode": number, "seed": 1000 + number}
    return {**named, "success_once": success, "error": error, "initial_state": f"{state}{number}", **other}


def test_pairs_are_counted_and_errors_left_out():
    outcomes = [(True, True), (True, False), (False, True), (False, False), (True, False), (False, False)]
    a = [*(line(n, of_a) for n, (of_a, _) in enumerate(outcomes)), line(6, None, error="died")]
    b = [*(line(n, of_b) for n, (_, of_b) in enumerate(outcomes)), line(6, True)]
    found = compare(a, b)
    assert found == Comparison(episodes=6, left_out=1, both=1, only_a=2, only_b=1)
    lines = comparison_text(found, "one", "other").splitlines()
    assert lines[0] == f"A  {share(3, 6)}  one" and lines[1] == f"B  {share(2, 6)}  other"
    numbers = [[float(n) for n in re.findall(r"[+-]?\d+\.?\d*", text)] for text in lines[2:]]
    # All outcomes of 3 coins are as uneven as 2 to 1, or more. B - A: -1 / 6, and (2 - 3) / 8 +- 1.96 sqrt((5 / 8 -
    # 1 / 64) / 8).
    assert numbers == [[6, 2, 1, 1], [1], [-16.7, -66.6, 41.6], []]
    assert len(comparison_text(replace(found, left_out=0), "one", "other").splitlines()) == 5


def test_what_cannot_be_paired_is_refused():
    with pytest.raises(ValueError, match="not over the same list.*--seed"):
        compare([line(0, True)], [line(1, True)])
    with pytest.raises(ValueError, match="episode 0 .seed 1000. began in another state"):
        compare([line(0, True)], [line(0, True, state="other")])


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 5), (0, 6), (1, 8), (10, 10), (0, 0), (9, 1)])
def test_mcnemar_is_the_sign_test_and_the_verdict_its_word(only_a, only_b):
    found = Comparison(episodes=60, left_out=0, both=30, only_a=only_a, only_b=only_b)
    n, few = only_a + only_b, min(only_a, only_b)
    expected = min(1.0, 2 * sum(math.comb(n, k) for k in range(few + 1)) / 2**n)
    assert found.p_value == pytest.approx(expected)
    word = "cannot tell" if expected >= 0.05 else ("A" if only_a > only_b else "B") + " succeeds more often"
    assert found.verdict.startswith(word)


def test_the_difference_and_its_interval_are_those_of_the_formula():
    """Bonett and Price (2012), equation 6: of shares after one more discordant pair each way; within what can be."""
    for episodes, only_a, only_b in ((21, 1, 7), (3, 0, 3), (3, 3, 0), (1, 1, 0), (40, 0, 0), (60, 5, 12)):
        a, b = (only_a + 1) / (episodes + 2), (only_b + 1) / (episodes + 2)
        half = 1.959963985 * ((a + b - (b - a) ** 2) / (episodes + 2)) ** 0.5
        expected = [(only_b - only_a) / episodes, *np.clip([b - a - half, b - a + half], -1, 1)]
        found = Comparison(episodes, 0, episodes - only_a - only_b, only_a, only_b).difference
        assert found == pytest.approx(expected, abs=1e-8)
    assert Comparison(0, 3, 0, 0, 0).difference == (0.0, -1.0, 1.0)


def test_the_interval_of_the_difference_holds_the_truth_as_often_as_it_says():
    """Over all outcomes of 40 episodes, weighed by how likely they are."""
    n, holds = 40, []
    for a, b in itertools.product((0.02, 0.1, 0.2, 0.35), repeat=2):
        covered = 0.0
        for only_a in range(n + 1):
            for only_b in range(n + 1 - only_a):
                estimate, low, high = Comparison(n, 0, 0, only_a, only_b).difference
                assert low <= estimate <= high
                if low <= b - a <= high:
                    covered += stats.multinomial.pmf([only_a, only_b, n - only_a - only_b], n, [a, b, 1 - a - b])
        holds.append(covered)
    assert min(holds) > 0.935 and 0.945 < sum(holds) / len(holds) < 0.98
