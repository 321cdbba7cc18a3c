"""What success in so many episodes says: an interval for one policy, and for two whether they differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

CONFIDENCE = 0.95


def wilson(successes: int, episodes: int) -> tuple[float, float]:
    """Wilson's interval for a probability of success; (0, 1) when nothing was tried."""
    if not episodes:
        return 0.0, 1.0
    interval = stats.binomtest(successes, episodes).proportion_ci(CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


def interval_with_errors(successes: int, episodes: int, errors: int) -> tuple[float, float]:
    """`wilson`, of so many episodes and others whose outcome is not known: if those failed, or if they succeeded."""
    listed = episodes + errors
    return wilson(successes, listed)[0], wilson(successes + errors, listed)[1]


def share(successes: int, episodes: int, errors: int = 0) -> str:
    """`57 of 60, 95.0 % (86.3 to 98.3)`. `errors`: of how many more episodes the outcome is not known."""
    besides = f"; {errors} more ended in an error" if errors else ""
    if not episodes:
        return f"none played{besides}"
    low, high = wilson(successes, episodes)
    text = f"{successes} of {episodes}, {successes / episodes:.1%} ({100 * low:.1f} to {100 * high:.1f})"
    return text.replace("%", " %") + besides


@dataclass(frozen=True)
class Comparison:
    """Two policies on the same episodes.

    Attributes:
        episodes: that both played to an end. left_out: those that either could not, because of an error.
        only_a, only_b: episodes in which only the first, only the second succeeded: the discordant pairs.
        p_value: McNemar's exact test of whether these two are equally likely.
        difference: successes of B over A as a share, and its interval.
    """

    episodes: int
    left_out: int
    both: int
    only_a: int
    only_b: int

    @property
    def p_value(self) -> float:
        discordant = self.only_a + self.only_b
        return float(stats.binomtest(self.only_a, discordant, 0.5).pvalue) if discordant else 1.0

    @property
    def difference(self) -> tuple[float, float, float]:
        """(estimate, low, high). Interval for paired proportions by Bonett and Price (2012): Wald's after one more
        discordant pair each way; the estimate is the plain one."""
        if not self.episodes:
            return 0.0, -1.0, 1.0
        a, b = ((count + 1) / (self.episodes + 2) for count in (self.only_a, self.only_b))
        half = float(stats.norm.ppf((1 + CONFIDENCE) / 2)) * math.sqrt((a + b - (b - a) ** 2) / (self.episodes + 2))
        return (self.only_b - self.only_a) / self.episodes, max(-1.0, b - a - half), min(1.0, b - a + half)

    @property
    def verdict(self) -> str:
        """In words; to be sure takes an exact test below 5 %."""
        if self.p_value >= 1 - CONFIDENCE:
            return "cannot tell: so large a difference is likely between equal policies; more episodes would say more"
        return f"{'B' if self.only_b > self.only_a else 'A'} succeeds more often"


def compare(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> Comparison:
    """Pair two evaluations' lines, which must be of the same list.

    Raises:
        ValueError: other episodes, or another initial state in one of them.
    """
    episodes = [tuple(line[key] for key in ("condition", "task", "episode", "seed")) for line in a]
    if episodes != [tuple(line[key] for key in ("condition", "task", "episode", "seed")) for line in b]:
        raise ValueError(
            f"the evaluations are not over the same list of episodes ({len(a)} and {len(b)}): evaluate both with the "
            "same --env.*, --eval.n_episodes and --seed"
        )
    counts = {"left_out": 0, "both": 0, "only_a": 0, "only_b": 0, "neither": 0}
    for line_a, line_b in zip(a, b, strict=True):
        if line_a["error"] is not None or line_b["error"] is not None:
            counts["left_out"] += 1
            continue
        if line_a["initial_state"] != line_b["initial_state"]:
            raise ValueError(
                f"{line_a['task']}, episode {line_a['episode']} (seed {line_a['seed']}) began in another state: "
                f"{line_a['initial_state']} and {line_b['initial_state']}; evaluate both with the same version of the "
                "environment"
            )
        pair = bool(line_a["success_once"]), bool(line_b["success_once"])
        counts[{(True, True): "both", (True, False): "only_a", (False, True): "only_b"}.get(pair, "neither")] += 1
    neither = counts.pop("neither")
    return Comparison(episodes=neither + counts["both"] + counts["only_a"] + counts["only_b"], **counts)


def comparison_text(comparison: Comparison, name_a: str, name_b: str) -> str:
    """Return the text of `evaluate.py --compare`. The caller escapes the names."""
    estimate, low, high = comparison.difference
    lines = [
        f"A  {share(comparison.both + comparison.only_a, comparison.episodes)}  {name_a}",
        f"B  {share(comparison.both + comparison.only_b, comparison.episodes)}  {name_b}",
        f"Of {comparison.episodes} episodes that both played, {comparison.only_a} succeeded with A only "
        f"and {comparison.only_b} with B only; exact McNemar p = {comparison.p_value:.3g}",
        f"B - A  {100 * estimate:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f})",
        f"Verdict  {comparison.verdict}",
    ]
    if comparison.left_out:
        lines.insert(3, f"{comparison.left_out} episodes are left out: one or the other ended in an error")
    return "\n".join(lines)
