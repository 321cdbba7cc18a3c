"""An environment of several suites and tasks, built as LeRobot builds LIBERO's."""

from dataclasses import dataclass

import gymnasium
import numpy as np
from lerobot.envs.configs import EnvConfig

from vla_finetuning.envs.configs import TwoBinsConfig
from vla_finetuning.envs.two_bins import TwoBins

STARTS = [(-18.0, 8.0, 10.0), (0.0, 8.0, 10.0), (18.0, 8.0, 10.0)]

UNLIMITED = 25  # steps where no length is set


class Started(TwoBins):
    """`TwoBins` from a list of starts, the next one at each reset, and without an end but success.

    Args:
        shift: of the starts, in cm; what tells one task from another.
    """

    initial_states = len(STARTS)

    def __init__(self, shift, horizon):
        super().__init__("rgb_array")
        self.shift, self._max_episode_steps = shift, horizon or UNLIMITED
        self.init_state_id = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        start = np.array(STARTS[self.init_state_id % len(STARTS)]) + self.shift
        self._state = start.astype(np.float32)
        self.init_state_id += 1
        return self._observation(), self._info()

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, float(self._state[0].round()), *rest


@EnvConfig.register_subclass("several")
@dataclass
class SeveralConfig(TwoBinsConfig):
    task: str | None = "near,far"
    task_ids: list[int] | None = None
    episode_length: int | None = 14

    def create_envs(self, n_envs, use_async_envs=False):
        print("Creating several environments")
        known = {"near": 2, "far": 1}
        return {
            suite: {
                task_id: gymnasium.vector.SyncVectorEnv(
                    [lambda s=suite, t=task_id: Started(3.0 * t - 8 * (s == "far"), self.episode_length)] * n_envs,
                    autoreset_mode=gymnasium.vector.AutoresetMode.NEXT_STEP,
                )
                for task_id in (range(known[suite]) if self.task_ids is None else self.task_ids)
            }
            for suite in self.task.split(",")
        }
