"""Split an environment's list of initial states into states for training and held-out states for evaluation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InitialStates:
    """A task's list of initial states. Episode k begins in state k modulo `count`, as in LeRobot's LIBERO.

    Attributes:
        count: length of the list.
        reserved: number of last states that only evaluation uses; 0: training and evaluation use all states.
    """

    count: int
    reserved: int = 0

    @property
    def trained(self) -> range:
        """Return the indices of the states for training."""
        return range(self.count - self.reserved)

    @property
    def evaluated(self) -> range:
        """Return the indices of the states for evaluation."""
        return range(self.count - self.reserved, self.count) if self.reserved else range(self.count)

    def train_number(self, nth: int) -> int:
        """Return the number of the n-th training episode, from 0; episodes cycle through the training states."""
        return self._number(self.trained, nth)

    def eval_number(self, nth: int) -> int:
        """Return the number of the n-th evaluation episode, from 0; episodes cycle through the evaluation states."""
        return self._number(self.evaluated, nth)

    def _number(self, states: range, nth: int) -> int:
        turn, place = divmod(nth, len(states))
        return states[place] + turn * self.count


def reserve_last(counts: dict[str, int], reserved: int) -> dict[str, InitialStates]:
    """Reserve the last states of each task for evaluation.

    Args:
        counts: number of initial states of each task.
        reserved: number of states to reserve, per task.
    Raises:
        ValueError: a task would have no state for training.
    """
    for task, count in counts.items():
        if reserved >= count:
            raise ValueError(
                f"{task} has {count} initial states, and --grpo.reserved_states={reserved} of them are held out of "
                "training: give fewer; with 0, evaluation is on states that were trained"
            )
    return {task: InitialStates(count, reserved) for task, count in counts.items()}
