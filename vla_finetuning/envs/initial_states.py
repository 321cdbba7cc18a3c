"""Initial states of environments that have a list of them: which of the list train a policy, and which are held out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InitialStates:
    """A task's list of initial states. Episode number k begins in state k modulo their count, as in LeRobot's LIBERO.

    Attributes:
        count: of the list. reserved: how many of the last states only evaluation uses; 0: all are used by both.
    """

    count: int
    reserved: int = 0

    @property
    def trained(self) -> range:
        """Return the states that training uses."""
        return range(self.count - self.reserved)

    @property
    def evaluated(self) -> range:
        """Return the states that evaluation uses."""
        return range(self.count - self.reserved, self.count) if self.reserved else range(self.count)

    def train_number(self, nth: int) -> int:
        """Return the number of the n-th training episode, from 0: the states of training in turns."""
        return self._number(self.trained, nth)

    def eval_number(self, nth: int) -> int:
        """Return the number of the n-th evaluation episode, from 0: the states of evaluation in turns, none twice."""
        return self._number(self.evaluated, nth)

    def _number(self, states: range, nth: int) -> int:
        turn, place = divmod(nth, len(states))
        return states[place] + turn * self.count


def reserve_last(counts: dict[str, int], reserved: int) -> dict[str, InitialStates]:
    """Reserve the last states of each task for evaluation.

    Args:
        counts: initial states of each task. reserved: of each task.
    Raises:
        ValueError: a task would have none left to train on.
    """
    for task, count in counts.items():
        if reserved >= count:
            raise ValueError(
                f"{task} has {count} initial states, and --grpo.reserved_states={reserved} of them are held out of "
                "training: give fewer; with 0, evaluation is on states that were trained"
            )
    return {task: InitialStates(count, reserved) for task, count in counts.items()}
