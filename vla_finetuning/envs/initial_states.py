"""Initial states of environments that have a list of them: which of the list train a policy, and which are held out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InitialStates:
    """A task's list of initial states. Episode number k begins in state k modulo their count, as in LeRobot's LIBERO.

    Attributes:
        count: of the list. reserved: states that only evaluation uses, ascending; none where all are used by both.
    """

    count: int
    reserved: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not all(0 <= state < self.count for state in self.reserved) or len(set(self.reserved)) >= self.count:
            raise ValueError(f"of {self.count} initial states, {list(self.reserved)} cannot be reserved for evaluation")

    @property
    def trained(self) -> tuple[int, ...]:
        """States that training uses, ascending."""
        return tuple(state for state in range(self.count) if state not in self.reserved)

    @property
    def evaluated(self) -> tuple[int, ...]:
        """States that evaluation uses, ascending."""
        return self.reserved or tuple(range(self.count))

    def train_number(self, nth: int) -> int:
        """The number of the n-th training episode, from 0: the states of training in turns."""
        return self._number(self.trained, nth)

    def eval_number(self, nth: int) -> int:
        """The number of the n-th evaluation episode, from 0: the states of evaluation in turns. No number twice."""
        return self._number(self.evaluated, nth)

    def _number(self, states: tuple[int, ...], nth: int) -> int:
        turn, place = divmod(nth, len(states))
        return states[place] + turn * self.count


def reserve_last(counts: dict[str, int], reserved: int) -> dict[str, InitialStates]:
    """Reserve the last states of each task for evaluation.

    Args:
        counts: initial states of each task. reserved: states of each task.
    Raises:
        ValueError: a task would have none left to train on.
    """
    for task, count in counts.items():
        if reserved >= count:
            raise ValueError(
                f"{task} has {count} initial states, and --grpo.reserved_states={reserved} of them are held out of "
                "training: give fewer; with 0, evaluation is on states that were trained"
            )
    return {task: InitialStates(count, tuple(range(count - reserved, count))) for task, count in counts.items()}
