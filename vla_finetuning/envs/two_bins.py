"""Simulate the demo's gantry as a gymnasium environment: `vla_finetuning/TwoBins-v0`.

Importing this module registers it with gymnasium; `configs` registers it with LeRobot. Imports neither LeRobot nor
torch, so that a process which only simulates starts in half a second.
"""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from vla_finetuning.envs import two_bins_scene
from vla_finetuning.envs.two_bins_scene import HIGH, INSTRUCTIONS, LOW, MANY_COLOURS, draw_scene

GYM_ID = "vla_finetuning/TwoBins-v0"
# Within this distance of the bin's centre, the gripper (4 cm wide) is wholly over the bin (15 cm wide). At full speed
# it needs 4 frames for 9 of the 10 cm, so it succeeds without stopping.
GOAL_RADIUS_CM = 5.0
RENDER_SCALE = 4


class TwoBins(gymnasium.Env[dict[str, Any], np.ndarray]):
    """A gantry, two bins, and an instruction that names one of them (`Scene.many_instructions`).

    An action is the gripper's target, float (3,) in cm; speed and range of the drives are limited. The episode ends
    when the gripper has stayed within `GOAL_RADIUS_CM` of a bin's centre for `DWELL_FRAMES` frames in a row. It is a
    success, with reward 1, if the instruction names this bin. `info["reached"]` is the colour of this bin while the
    gripper stays, else "". Scene and instruction are functions of `reset(seed=...)` alone.

    Args:
        terminates: whether an episode ends over a bin; if not, it lasts to its step limit, and success at the end means
            that the gripper has stayed.

    Attributes:
        rendering: whether steps render the cameras; if not, images are black.
        rendering_s: seconds that steps spent rendering; the reader may reset it.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": two_bins_scene.FPS}
    robot_type = two_bins_scene.ROBOT_TYPE
    dimension_names = dict.fromkeys(("observation.state", "action"), two_bins_scene.AXES)
    action_space = spaces.Box(LOW, HIGH, dtype=np.float32)
    observation_space = spaces.Dict(
        {
            "agent_pos": spaces.Box(LOW, HIGH, dtype=np.float32),
            "pixels": spaces.Dict(
                {name: spaces.Box(0, 255, (*size, 3), np.uint8) for name, size in two_bins_scene.CAMERAS.items()}
            ),
        }
    )

    def __init__(
        self, render_mode: str | None = None, terminates: bool = True, many_instructions: bool = False
    ) -> None:
        self.render_mode, self._terminates, self._many = render_mode, terminates, many_instructions
        self.rendering, self.rendering_s = True, 0.0
        self.task = self.task_description = ""

    @property
    def subtask(self) -> str:
        """Return the demonstrator's subtask in this frame."""
        before, after = self.subtasks(self.task)
        return after if self._frames_over[self.task] else before

    @staticmethod
    def subtasks(colour: str) -> tuple[str, str]:
        """Return the demonstrator's subtasks before and after it reaches the bin of a colour."""
        return f"move to the {colour} bin", f"stay over the {colour} bin"

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self._scene = draw_scene(self.np_random, self._many)
        plain = {text: colour for colour, text in INSTRUCTIONS.items()}
        instructions = list((self._scene.many_instructions if self._many else plain).items())
        self.task_description, self.task = instructions[int(self.np_random.integers(len(instructions)))]
        self._state = np.array(self._scene.start, np.float32)
        self._frame = 0
        colours = [colour for colour in MANY_COLOURS if colour in (self._scene.left, self._scene.right)]
        self._frames_over, self._stayed = dict.fromkeys(colours, 0), list[str]()
        return self._observation(), self._info()

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        target = np.asarray(action, np.float32)
        if target.shape != self.action_space.shape or not np.isfinite(target).all():
            names = ", ".join(two_bins_scene.AXES)
            raise ValueError(f"the {self.robot_type} cannot go to {action!r:.200}; expected {names}, finite numbers")
        moved = two_bins_scene.move(self._state, np.clip(target, LOW, HIGH))
        self._state = np.clip(moved, LOW, HIGH)
        self._frame += 1
        for colour in self._frames_over:
            distance = float(np.linalg.norm(self._state - np.array(self._scene.place(colour), np.float32)))
            self._frames_over[colour] = self._frames_over[colour] + 1 if distance <= GOAL_RADIUS_CM else 0
            if self._frames_over[colour] == two_bins_scene.DWELL_FRAMES and colour not in self._stayed:
                self._stayed.append(colour)
        info = self._info()
        return self._observation(), float(info["is_success"]), self._terminates and bool(info["reached"]), False, info

    def render(self) -> np.ndarray | None:  # type: ignore[override]
        """Return the table from above, uint8 (H, W, 3), larger than in observations."""
        if self.render_mode is None:
            return None
        above = next(iter(two_bins_scene.render(self._scene, self._state).values()))
        return above.repeat(RENDER_SCALE, 0).repeat(RENDER_SCALE, 1)

    def expert_action(self) -> np.ndarray:
        """Return the demonstrator's action in this frame, float32 (3,), if it alone has acted in the episode."""
        _, actions = two_bins_scene.demonstrate(self._scene, self.task)
        return actions[min(self._frame, len(actions) - 1)]

    def state_hash(self) -> str:
        """Return 16 hex digits of the complete state."""
        scene = [self._scene.left, self._scene.right, self.task, self._frames_over, self._state.tolist()]
        scene += [] if self._terminates else [self._stayed]
        scene += [self.task_description, self._scene.left_shape, self._scene.right_shape] if self._many else []
        return hashlib.sha256(json.dumps(scene).encode()).hexdigest()[:16]

    def _observation(self) -> dict[str, Any]:
        if self.rendering:
            started = time.perf_counter()
            pixels = two_bins_scene.render(self._scene, self._state)
            self.rendering_s += time.perf_counter() - started
        else:
            pixels = {name: np.zeros((*size, 3), np.uint8) for name, size in two_bins_scene.CAMERAS.items()}
        return {"agent_pos": self._state.copy(), "pixels": pixels}

    def _info(self) -> dict[str, Any]:
        reached = next((colour for colour in self._stayed if self._frames_over[colour]), "")
        return {"is_success": reached == self.task, "reached": reached}


gymnasium.register(GYM_ID, entry_point=f"{__name__}:TwoBins", max_episode_steps=two_bins_scene.EPISODE_LENGTH)
