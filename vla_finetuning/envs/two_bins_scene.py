"""Two bins on a table: the scene that the demo's dataset shows and that its policy is tried in.

A gantry robot moves its gripper over one of two bins. Which bin is red and which is blue changes from scene to scene,
and only the cameras show it; which of them to go to, only the instruction says. Knows nothing but numpy.
"""

from dataclasses import dataclass

import numpy as np

INSTRUCTIONS = {"red": "go to the red bin", "blue": "go to the blue bin"}
FPS = 10

# The robot's frame, in centimetres: x to the right, y away from the robot, z up.
TABLE_X, TABLE_Y, TABLE_Z = (-30.0, 30.0), (0.0, 40.0), (0.0, 20.0)
BINS = {"left": (-18.0, 28.0, 3.0), "right": (18.0, 28.0, 3.0)}
BIN_HALF_WIDTH, GRIPPER_HALF_WIDTH = 7.5, 2.0
WRIST_HALF_VIEW = 10.0
SPEED_CM_PER_FRAME = 2.5
DWELL_FRAMES = 4  # over the bin, before the episode ends

COLOURS = {"red": (200, 40, 40), "blue": (40, 70, 200), "table": (170, 165, 150), "gripper": (30, 30, 30)}
CAMERAS = {"top": (64, 96), "front": (56, 56), "wrist": (48, 48)}  # height, width
AXES = ["x_cm", "y_cm", "z_cm"]


@dataclass(frozen=True)
class Scene:
    """What an episode's cameras see before the robot moves: the colour of each bin, and the gripper's position."""

    left: str
    right: str
    start: tuple[float, float, float]

    def place(self, colour: str) -> tuple[float, float, float]:
        """Where the gripper is over the bin of a colour, in cm."""
        return BINS["left" if self.left == colour else "right"]


def draw_scene(rng: np.random.Generator) -> Scene:
    """A scene at random: which bin is red, and the gripper anywhere on the robot's side of the table."""
    left, right = ("red", "blue") if rng.random() < 0.5 else ("blue", "red")
    x, y, z = rng.uniform((-20.0, 4.0, 8.0), (20.0, 14.0, 16.0))
    return Scene(left, right, (float(x), float(y), float(z)))


def demonstrate(scene: Scene, colour: str) -> tuple[np.ndarray, np.ndarray]:
    """Move straight to the bin of a colour at constant speed, and stay there for a moment.

    Returns:
        State and action, float32 (N, 3), in cm: the gripper's position, and its target one frame later.
    """
    goal = np.array(scene.place(colour))
    start = np.array(scene.start)
    distance = float(np.linalg.norm(goal - start))
    travelled = np.minimum(np.arange(int(np.ceil(distance / SPEED_CM_PER_FRAME))) * SPEED_CM_PER_FRAME, distance)
    path = start + (goal - start) * (travelled / distance)[:, None]
    path = np.concatenate([path, np.tile(goal, (DWELL_FRAMES + 1, 1))]).astype(np.float32)
    return path[:-1], path[1:]


def render(scene: Scene, position: np.ndarray) -> dict[str, np.ndarray]:
    """The three cameras' images of the gripper at `position`, uint8 (H, W, 3) each.

    The top camera looks down on the table, the front camera along it (the gripper appears at its height), the wrist
    camera straight down from the gripper and sees only what is near.
    """
    x, y, z = (float(value) for value in position)
    table = [(bin_x, bin_y, BIN_HALF_WIDTH, getattr(scene, side)) for side, (bin_x, bin_y, _) in BINS.items()]
    front = [(bin_x, bin_z + 4.0, BIN_HALF_WIDTH, getattr(scene, side)) for side, (bin_x, _, bin_z) in BINS.items()]
    near = (x - WRIST_HALF_VIEW, x + WRIST_HALF_VIEW), (y - WRIST_HALF_VIEW, y + WRIST_HALF_VIEW)
    return {
        "top": _draw(CAMERAS["top"], TABLE_X, TABLE_Y, [*table, (x, y, GRIPPER_HALF_WIDTH, "gripper")]),
        "front": _draw(CAMERAS["front"], TABLE_X, TABLE_Z, [*front, (x, z, GRIPPER_HALF_WIDTH, "gripper")]),
        "wrist": _draw(CAMERAS["wrist"], *near, table),
    }


def _draw(
    size: tuple[int, int],
    horizontal: tuple[float, float],
    vertical: tuple[float, float],
    squares: list[tuple[float, float, float, str]],
) -> np.ndarray:
    """Squares (centre, half width, colour), later ones in front, on the table's colour; uint8 (H, W, 3)."""
    height, width = size
    columns = np.linspace(*horizontal, width)
    rows = np.linspace(*vertical, height)[::-1]
    image = np.full((height, width, 3), COLOURS["table"], np.uint8)
    for across, up, half, colour in squares:
        image[np.ix_(np.abs(rows - up) <= half, np.abs(columns - across) <= half)] = COLOURS[colour]
    return image
