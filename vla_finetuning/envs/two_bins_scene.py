"""Draw the scene of the demo's datasets and environment, two bins on a table, and move its gantry.

A robot moves its gripper over one of two bins. Only the cameras show which bin is red and which is blue, and only the
instruction names the goal. Imports numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

INSTRUCTIONS = {"red": "go to the red bin", "blue": "go to the blue bin"}

# The robot's frame, in centimetres: x to the right, y away from the robot, z up.
TABLE_X, TABLE_Y, TABLE_Z = (-30.0, 30.0), (0.0, 40.0), (0.0, 20.0)
BINS = {"left": (-18.0, 28.0, 3.0), "right": (18.0, 28.0, 3.0)}
BIN_HALF_WIDTH, GRIPPER_HALF_WIDTH = 7.5, 2.0
WRIST_HALF_VIEW = 10.0
DWELL_S = 0.4  # time over the bin, after which the episode ends
# Demonstrations take at most 2.3 s.
EPISODE_S = 4.0

COLOURS = {"red": (200, 40, 40), "blue": (40, 70, 200), "table": (170, 165, 150), "gripper": (30, 30, 30)}
# Colours of bins with many instructions.
MANY_COLOURS = {"red": COLOURS["red"], "blue": COLOURS["blue"], "green": (50, 150, 70), "yellow": (225, 195, 50)}
COLOURS |= MANY_COLOURS
SHAPES = ("square", "round")


@dataclass(frozen=True)
class Scene:
    """An episode's initial scene: each bin's colour and shape, and the gripper's position in cm."""

    left: str
    right: str
    start: tuple[float, float, float]
    left_shape: str = SHAPES[0]
    right_shape: str = SHAPES[0]

    @property
    def many_instructions(self) -> dict[str, str]:
        """Return all instructions, by colour, side, shape or the other bin, and the colour of the bin of each."""
        named = {f"go to the {colour} bin": colour for colour in (self.left, self.right)}
        sides = {"go to the left bin": self.left, "go to the right bin": self.right}
        shapes = {f"go to the {self.left_shape} bin": self.left, f"go to the {self.right_shape} bin": self.right}
        others = {f"go to the bin left of the {self.right} one": self.left}
        others |= {f"go to the bin right of the {self.left} one": self.right}
        return named | sides | (shapes if self.left_shape != self.right_shape else {}) | others

    def place(self, colour: str) -> tuple[float, float, float]:
        """Return the gripper's position over the bin of a colour, in cm."""
        return BINS["left" if self.left == colour else "right"]


def draw_scene(rng: np.random.Generator, many_colours: bool = False) -> Scene:
    """Draw a random scene: the sides of the red and the blue bin, and the gripper on the robot's side of the table.

    With `many_colours`, also both bins' colours, two of the four of `MANY_COLOURS`, and their shapes.
    """
    shapes: Sequence[str] = ()
    if many_colours:
        left, right = map(str, rng.permutation(list(MANY_COLOURS))[:2])
        shapes = [str(shape) for shape in rng.choice(SHAPES, 2)]
    else:
        left, right = ("red", "blue") if rng.random() < 0.5 else ("blue", "red")
    x, y, z = rng.uniform((-20.0, 4.0, 8.0), (20.0, 14.0, 16.0))
    return Scene(left, right, (float(x), float(y), float(z)), *shapes)


# ---- the gantry -----------------------------------------------------------------------------------------------------

ROBOT_TYPE, FPS = "tabletop_gantry", 10
AXES = ["x_cm", "y_cm", "z_cm"]
# Range of the gripper.
LOW, HIGH = (np.array(limits, np.float32) for limits in zip(TABLE_X, TABLE_Y, TABLE_Z, strict=True))
CAMERAS = {"top": (64, 96), "front": (56, 56), "wrist": (48, 48)}
SPEED_CM_PER_FRAME = 2.5
# Limit of the drives.
MAX_CM_PER_FRAME = 3.0
# Consecutive frames over a bin that end an episode, and the step limit.
DWELL_FRAMES, EPISODE_LENGTH = round(DWELL_S * FPS), round(EPISODE_S * FPS)


def demonstrate(scene: Scene, colour: str) -> tuple[np.ndarray, np.ndarray]:
    """Return states and actions of a straight move to the bin of a colour, where it stays for DWELL_FRAMES + 1 frames.

    Both float32 (N, 3), in cm: the gripper's position, and its position one frame later.
    """
    begin, end = np.array(scene.start), np.array(scene.place(colour))
    distance = float(np.linalg.norm(end - begin))
    travelled = np.arange(0, distance, SPEED_CM_PER_FRAME)
    path = begin + (end - begin) * (travelled / distance)[:, None]
    path = np.concatenate([path, np.tile(end, (DWELL_FRAMES + 1, 1))]).astype(np.float32)
    return path[:-1], path[1:]


def move(position: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Move straight towards a target, at most `MAX_CM_PER_FRAME`."""
    way = target - position
    share = MAX_CM_PER_FRAME / max(float(np.linalg.norm(way)), MAX_CM_PER_FRAME)
    return position + way * np.float32(share)


def render(scene: Scene, position: np.ndarray) -> dict[str, np.ndarray]:
    """Return the three cameras' images of the gripper at `position`, uint8 (H, W, 3) each.

    The top camera looks down on the table, the front camera along it, the wrist camera straight down from the gripper.
    A round bin is round from above only.
    """
    x, y, z = (float(value) for value in position)
    table, front = [], []
    for side, (bin_x, bin_y, bin_z) in BINS.items():
        colour, shape = getattr(scene, side), getattr(scene, f"{side}_shape")
        table.append(Patch(bin_x, bin_y, BIN_HALF_WIDTH, colour, shape))
        front.append(Patch(bin_x, bin_z + 4.0, BIN_HALF_WIDTH, colour))
    near = (x - WRIST_HALF_VIEW, x + WRIST_HALF_VIEW), (y - WRIST_HALF_VIEW, y + WRIST_HALF_VIEW)
    return {
        "top": draw(CAMERAS["top"], TABLE_X, TABLE_Y, [*table, Patch(x, y, GRIPPER_HALF_WIDTH, "gripper")]),
        "front": draw(CAMERAS["front"], TABLE_X, TABLE_Z, [*front, Patch(x, z, GRIPPER_HALF_WIDTH, "gripper")]),
        "wrist": draw(CAMERAS["wrist"], *near, table),
    }


class Patch(NamedTuple):
    """A shape for `draw`: its centre and half its width in cm, one of `COLOURS` and one of `SHAPES`."""

    across: float
    up: float
    half_width: float
    colour: str
    shape: str = SHAPES[0]


def draw(
    size: tuple[int, int], horizontal: tuple[float, float], vertical: tuple[float, float], patches: Sequence[Patch]
) -> np.ndarray:
    """Draw patches, later ones in front, on the table's colour; uint8 (H, W, 3)."""
    height, width = size
    columns = np.linspace(*horizontal, width)
    rows = np.linspace(*vertical, height)[::-1]
    image = np.full((height, width, 3), COLOURS["table"], np.uint8)
    for across, up, half, colour, shape in patches:
        away_up, away_across = np.abs(rows - up)[:, None], np.abs(columns - across)
        if shape == "round":
            covered = away_up**2 + away_across**2 <= half**2
        else:
            covered = (away_up <= half) & (away_across <= half)
        image[covered] = COLOURS[colour]
    return image
