"""Provide Meta-World's 50 tasks as gymnasium environments with LeRobot's episodes, rendered only on demand.

Needs the packages of requirements-metaworld.txt, but not LeRobot, so that a process which only simulates starts fast.
"""

from __future__ import annotations

import hashlib
import pickle
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

GYM_ID = "vla_finetuning/Metaworld-v0"
# Meta-World's environments refuse more steps.
EPISODE_LENGTH = 500
FPS = 80
# LeRobot's camera: Meta-World's corner camera moved nearer; images are rotated by 180 degrees.
CAMERA, CAMERA_POSITION = "corner2", (0.75, 0.075, 0.7)
OBS_TYPES = ("pixels", "pixels_agent_pos", "environment_state_agent_pos")
# "full": MuJoCo's default, like LeRobot. "fast": no shadows and no multisampling, an eighth of the time on CPUs.
QUALITIES = ("full", "fast")


class Metaworld(gymnasium.Env[dict[str, Any], np.ndarray]):
    """A Sawyer arm, a table and a task, for instance `reach-v3`.

    An action is the gripper's motion in x, y, z (1 is a centimetre) and the force of its fingers, float (4,) in
    [-1, 1]. The episode ends with the first successful step. The scene is a function of `reset(seed=...)` alone. Seeds,
    states and, at 480x480 in full quality, images equal those of LeRobot 0.6.1's `MetaworldEnv`.

    Args:
        obs_type: observed parts, one of OBS_TYPES. `pixels`: the camera, uint8 (H, W, 3). `agent_pos`: the gripper's
            position in metres and its opening, float64 (4,). `environment_state`: the input of scripted experts,
            float64 (39,).
        image_size: height and width in pixels.
        quality: one of QUALITIES.

    Attributes:
        rendering: whether steps render the camera; if not, images are black.
        rendering_s: seconds that steps spent rendering; the reader may reset it.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": FPS}
    dimension_names = {
        "observation.state": ["x_m", "y_m", "z_m", "open"],
        "action": ["dx_cm", "dy_cm", "dz_cm", "grip"],
    }
    robot_type = "sawyer"

    def __init__(
        self,
        task: str,
        instruction: str = "",
        obs_type: str = "pixels_agent_pos",
        image_size: tuple[int, int] = (480, 480),
        quality: str = "full",
        render_mode: str | None = None,
    ) -> None:
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS
        from metaworld.types import Task

        self.task, self.task_description, self.render_mode = task, instruction, render_mode
        self.rendering, self.rendering_s = True, 0.0
        self._size, self._quality = tuple(image_size), quality
        env_class = ALL_V3_ENVIRONMENTS[task]
        self._env = env_class()
        # A task makes the goal observable. Its own goal has no effect, because each reset draws another.
        named = {"env_cls": env_class, "rand_vec": None, "partially_observable": False}
        self._env.set_task(Task(task, pickle.dumps(named)))
        self._env._freeze_rand_vec, self._env.seeded_rand_vec = False, True
        self._env.model.cam_pos[self._env.model.camera(CAMERA).id] = CAMERA_POSITION
        self._renderer: Any = None

        shown: dict[str, spaces.Space[Any]] = {
            "pixels": spaces.Box(0, 255, (*self._size, 3), np.uint8),
            "agent_pos": spaces.Box(-np.inf, np.inf, (4,), np.float64),
            "environment_state": spaces.Box(-np.inf, np.inf, (39,), np.float64),
        }
        self._shown = {key: space for key, space in shown.items() if key in obs_type}
        self.observation_space = spaces.Dict(self._shown)
        self.action_space = spaces.Box(-1, 1, (4,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._env.seed(seed)
        self.environment_state, _ = self._env.reset()
        return self._observation(), {"is_success": False}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        if np.shape(action) != (4,) or not np.isfinite(action).all():
            raise ValueError(f"{self.task} is given the action {action!r:.200}; expected four finite numbers")
        self.environment_state, reward, _, truncated, info = self._env.step(action)
        success = bool(info["success"])
        return self._observation(), float(reward), success, truncated, {**info, "is_success": success}

    def render(self) -> np.ndarray:  # type: ignore[override]
        """Render the camera, uint8 (H, W, 3)."""
        import mujoco

        model = self._env.model
        if self._renderer is None:
            model.vis.global_.offheight, model.vis.global_.offwidth = self._size
            if self._quality == "fast":
                model.vis.quality.offsamples = 0
            self._renderer = mujoco.Renderer(model, *self._size)
            self._renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = self._quality != "fast"
        self._renderer.update_scene(self._env.data, CAMERA)
        return self._renderer.render()[::-1, ::-1].copy()

    def expert_action(self) -> np.ndarray:
        """Return the action of the task's scripted expert, float32 (4,), clipped to [-1, 1] as the environment does."""
        from metaworld.policies import ENV_POLICY_MAP

        # Experts have no memory, but some write to the state that they are given.
        action = ENV_POLICY_MAP[self.task]().get_action(self.environment_state.copy())
        return np.clip(action, -1, 1).astype(np.float32)

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
        self._env.close()

    def state_hash(self) -> str:
        """Return 16 hex digits of all positions, velocities and the goal."""
        data = self._env.data
        parts = (data.qpos, data.qvel, data.mocap_pos, self.environment_state)
        return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()[:16]

    def _observation(self) -> dict[str, Any]:
        observation: dict[str, Any] = {}
        if "pixels" in self._shown:
            observation["pixels"] = np.zeros((*self._size, 3), np.uint8)
            if self.rendering:
                started = time.perf_counter()
                observation["pixels"] = self.render()
                self.rendering_s += time.perf_counter() - started
        for key, width in (("agent_pos", 4), ("environment_state", 39)):
            if key in self._shown:
                observation[key] = self.environment_state[:width].copy()
        return observation


gymnasium.register(GYM_ID, entry_point=f"{__name__}:Metaworld", max_episode_steps=EPISODE_LENGTH)
