import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict


class Point(gymnasium.Env):
    observation_space = Dict({"pixels": Box(0, 255, (32, 32, 3), np.uint8), "agent_pos": Box(-1, 1, (3,), np.float32)})
    action_space = Box(-1, 1, (3,), np.float32)
    task_description = "go to the corner"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)  # seeds self.np_random
        self.position = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return self.see(), {"is_success": False}

    def step(self, action):
        self.position = np.clip(self.position + 0.1 * np.clip(action, -1, 1), -1, 1).astype(np.float32)
        success = bool(self.position.min() > 0.5)
        return self.see(), float(success), success, False, {"is_success": success}

    def see(self):
        grey = np.uint8(127 * (1 + self.position))  # red, green and blue tell where it is
        return {"pixels": np.full((32, 32, 3), grey), "agent_pos": self.position.copy()}


gymnasium.register("mine/Point-v0", entry_point=Point, max_episode_steps=20)
