"""Compute success rates with confidence intervals, and compare two policies by a paired test.

An episode has two outcomes: success at any time, as in `lerobot-eval`, and success in the last step. Episodes with the
same task, instruction and initial state are not independent. Intervals and tests therefore count each such scene once,
by the mean of its episodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

from vla_finetuning.rollouts.episodes import episode_key

CONFIDENCE = 0.95
# Fields of episodes.jsonl: success at any time, and in the last step.
ONCE, AT_END = "success_once", "success_at_end"


def wilson(successes: float, scenes: int) -> tuple[float, float]:
    """Return Wilson's interval of a success probability, given the sum of the scenes' means; (0, 1) for no scenes."""
    if not scenes:
        return 0.0, 1.0
    z, p = float(stats.norm.ppf((1 + CONFIDENCE) / 2)), successes / scenes
    middle, half = p + z * z / (2 * scenes), z * math.sqrt(p * (1 - p) / scenes + (z / (2 * scenes)) ** 2)
    low, high = ((middle + sign * half) / (1 + z * z / scenes) for sign in (-1, 1))
    return (low if successes > 0 else 0.0), (high if successes < scenes else 1.0)


def scene_of(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key of an episode's scene; a failed episode is a scene of its own."""
    if line["error"] is None:
        return line["task"], line["instruction"], line["initial_state"]
    return line["task"], line["episode"], line["seed"], None


def _scene_means(outcomes: Iterable[tuple[tuple[Any, ...], float]]) -> list[float]:
    """Return the mean outcome of each scene, given (scene, outcome) pairs."""
    by_scene: dict[tuple[Any, ...], list[float]] = {}
    for scene, outcome in outcomes:
        by_scene.setdefault(scene, []).append(outcome)
    return [sum(values) / len(values) for values in by_scene.values()]


def score(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compute the success rate of lines of episodes.jsonl, as JSON.

    Returns:
        `{"successes", "episodes", "interval", "successes_at_end", "interval_at_end"}` of the episodes without an error;
        `scenes`, the number of distinct scenes, if it is smaller; `errors`, the number of failed episodes, if any. The
        intervals cover both outcomes of failed episodes.
    """
    played = [line for line in lines if line["error"] is None]
    result: dict[str, Any] = {"episodes": len(played)}
    for outcome, suffix in ((ONCE, ""), (AT_END, "_at_end")):
        bounds = []
        for assumed in (0.0, 1.0):
            means = _scene_means((scene_of(x), float(x[outcome]) if x["error"] is None else assumed) for x in lines)
            bounds.append(wilson(sum(means), len(means)))
        result[f"successes{suffix}"] = sum(bool(line[outcome]) for line in played)
        result[f"interval{suffix}"] = [bounds[0][0], bounds[1][1]]
    if (scenes := len({scene_of(line) for line in played})) < len(played):
        result["scenes"] = scenes
    return result | ({"errors": len(lines) - len(played)} if len(played) < len(lines) else {})


def share(result: Mapping[str, Any]) -> str:
    """Format a `score`: `57 of 60, 95.0 % (86.3 to 98.3); at the end 55 of 60, 91.7 % (81.9 to 96.4)`."""
    episodes, errors = result["episodes"], result.get("errors", 0)
    besides = f"; {result['successes']} of {episodes + errors} asked for: {errors} ended in an error" if errors else ""
    if not episodes:
        return f"none played{besides}"
    if "scenes" in result:
        scenes = result["scenes"]
        besides = f"; {episodes} episodes of {scenes} distinct scene{'s' * (scenes != 1)}{besides}"

    def words(successes: int, interval: Sequence[float]) -> str:
        low, high = interval
        return f"{successes} of {episodes}, {100 * successes / episodes:.1f} % ({100 * low:.1f} to {100 * high:.1f})"

    once, at_end = ((result[f"successes{name}"], result[f"interval{name}"]) for name in ("", "_at_end"))
    end = "; the same at the end" if at_end[0] == once[0] else f"; at the end {words(*at_end)}"
    return f"{words(*once)}{end if once[0] else ''}{besides}"


@dataclass(frozen=True)
class Comparison:
    """A paired comparison: mean outcomes of policies A and B in each distinct scene, from 0 to 1."""

    pairs: tuple[tuple[float, float], ...]

    @property
    def better(self) -> tuple[int, int]:
        """Return the numbers of discordant scenes: A succeeded more often, B succeeded more often."""
        return sum(a > b for a, b in self.pairs), sum(b > a for a, b in self.pairs)

    @property
    def p_value(self) -> float:
        """Return the p-value of the exact sign test; equal to McNemar's if each scene was played once."""
        a, b = self.better
        return float(stats.binomtest(a, a + b, 0.5).pvalue) if a + b else 1.0

    @property
    def difference(self) -> tuple[float, float, float]:
        """Return estimate and interval bounds of B - A by Bonett and Price (2012): Wald's with two added pairs."""
        if not self.pairs:
            return 0.0, -1.0, 1.0
        scenes = len(self.pairs)
        lost, gained = (sum(max(0.0, sign * (b - a)) for a, b in self.pairs) for sign in (-1, 1))
        a, b = ((count + 1) / (scenes + 2) for count in (lost, gained))
        half = float(stats.norm.ppf((1 + CONFIDENCE) / 2)) * math.sqrt((a + b - (b - a) ** 2) / (scenes + 2))
        return (gained - lost) / scenes, max(-1.0, b - a - half), min(1.0, b - a + half)

    @property
    def verdict(self) -> str:
        """Return the verdict as text; one policy is better only if the exact test is below 5 %."""
        if self.p_value >= 1 - CONFIDENCE:
            return "cannot tell: equal policies often differ as much by chance; more episodes would say more"
        a, b = self.better
        return f"{'B' if b > a else 'A'} succeeds more often"


def paired(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Pair the lines of two evaluations of the same list; omit episodes that failed in either.

    Raises ValueError if the lists or an episode's initial states differ.
    """
    if list(map(episode_key, a)) != list(map(episode_key, b)):
        raise ValueError(
            f"the evaluations are not over the same list of episodes ({len(a)} and {len(b)}): evaluate both with the "
            "same --env.*, --eval.n_episodes and --seed"
        )
    pairs = [pair for pair in zip(a, b, strict=True) if all(line["error"] is None for line in pair)]
    for line_a, line_b in pairs:
        (_, *began_a), (_, *began_b) = scene_of(line_a), scene_of(line_b)
        if began_a != began_b:
            raise ValueError(
                f"{line_a['task']}, episode {line_a['episode']} (seed {line_a['seed']}) began with another instruction "
                f"or in another state: {began_a} and {began_b}; evaluate both with the same version of the environment"
            )
    return pairs


def compare(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], outcome: str) -> Comparison:
    """Compare `paired` lines by one outcome, `ONCE` or `AT_END`."""
    a, b = (_scene_means((scene_of(pair[n]), float(pair[n][outcome])) for pair in pairs) for n in (0, 1))
    return Comparison(tuple(zip(a, b, strict=True)))


def comparison_text(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], name_a: str, name_b: str) -> str:
    """Format the comparison of two evaluations' lines; names are not escaped. Raises as `paired`."""
    pairs = paired(a, b)
    scores = [score([pair[n] for pair in pairs]) for n in (0, 1)]
    lines = [f"A  {share(scores[0])}  {name_a}", f"B  {share(scores[1])}  {name_b}"]
    if left_out := len(a) - len(pairs):
        errors = [sum(line["error"] is not None for line in played) for played in (a, b)]
        why = f"{errors[0]} ended in an error with A, {errors[1]} with B"
        lines.append(f"{left_out} of {len(a)} episodes asked for are left out: {why}")
    for outcome, title in ((ONCE, "At any time"), (AT_END, "At the end")):
        result = compare(pairs, outcome)
        (only_a, only_b), (estimate, low, high) = result.better, result.difference
        lines += [
            f"{title}: of {len(result.pairs)} distinct scenes that both played, A succeeded more often in {only_a} and "
            f"B in {only_b}; exact McNemar p = {result.p_value:.3g}",
            f"  B - A    {100 * estimate:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f})",
            f"  Verdict  {result.verdict}",
        ]
    return "\n".join(lines)
