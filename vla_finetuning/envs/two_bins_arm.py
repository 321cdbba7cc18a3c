"""An arm of five joints that does the task of `two_bins_scene`: another robot in the same scenes.

Its action is in degrees of its joints, where the gantry's is in centimetres; it moves at another rate and has other
cameras. Its joints are those of small desktop arms: pan, lift, elbow, wrist flex, wrist roll. Knows nothing but numpy.
"""

from __future__ import annotations

import numpy as np

from vla_finetuning.envs.two_bins_scene import COLOURS, DWELL_S, Robot, Scene, draw, squares_above, straight_path

FPS = 15
JOINTS = ["shoulder_pan_deg", "shoulder_lift_deg", "elbow_flex_deg", "wrist_flex_deg", "wrist_roll_deg"]
LOW, HIGH = (-90.0, -20.0, -160.0, -150.0, -120.0), (90.0, 150.0, 0.0, 60.0, 120.0)
# The most that a joint turns in a frame, in degrees. Demonstrations need less than 10.
MAX_DEG_PER_FRAME = 12.0
SPEED_CM_PER_FRAME = 2.0

# In centimetres, in the scene's frame: the pan joint's axis stands at this place, across the table from where the
# gantry's operator is, and the lift joint is this far up it.
BASE_X, BASE_Y, SHOULDER_Z = 0.0, 46.0, 10.0
UPPER_ARM, FOREARM, HAND = 26.0, 26.0, 8.0

CAMERAS = {"overhead": (72, 96), "hand": (40, 40)}
OVERHEAD_X, OVERHEAD_Y = (-32.0, 32.0), (2.0, 50.0)
HAND_VIEW, LINK_HALF_WIDTH = (-12.0, 12.0), 1.5


# ---- kinematics -----------------------------------------------------------------------------------------------------


def forward(joints: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the arm's points are, and how its hand is turned.

    Angles are in degrees. Pan turns the arm about the vertical, from straight ahead (-y) to its left. Lift, elbow and
    wrist flex turn upper arm, forearm and hand upwards in the arm's plane, each against the link before it; with all at
    zero the arm lies level. Wrist roll turns the hand about its own axis, clockwise as seen along it.

    Returns:
        Shoulder, elbow, wrist and the hand's tip, float64 (4, 3) in cm; and float64 (3, 3), whose columns are the
        hand's axes in the scene's frame: to its right, along it, and up, as seen when it points straight ahead.
    """
    pan, lift, elbow, flex, roll = np.radians(np.asarray(joints, np.float64))
    up = np.cumsum((lift, elbow, flex))
    ahead = np.array([np.sin(pan), -np.cos(pan), 0.0])
    vertical = np.array([0.0, 0.0, 1.0])
    links = np.array([UPPER_ARM, FOREARM, HAND])[:, None] * (
        np.cos(up)[:, None] * ahead + np.sin(up)[:, None] * vertical
    )
    points = np.array([BASE_X, BASE_Y, SHOULDER_Z]) + np.concatenate([np.zeros((1, 3)), np.cumsum(links, axis=0)])
    along = links[2] / HAND
    right = np.cross(ahead, vertical)
    above = np.cross(right, along)
    turned = [np.cos(roll) * right - np.sin(roll) * above, along, np.cos(roll) * above + np.sin(roll) * right]
    return points, np.stack(turned, axis=1)


def inverse(tip: np.ndarray) -> np.ndarray:
    """The joints with which the hand points straight down at a place and is turned as with pan at zero; float64 (5,).

    Of the two ways to get there the one with the elbow up. The inverse of `forward`, exactly: pan from the direction,
    lift and elbow from the triangle of upper arm, forearm and shoulder to wrist.

    Args:
        tip: (3,) in cm.
    Raises:
        ValueError: it is out of reach.
    """
    x, y, z = np.asarray(tip, np.float64) - (BASE_X, BASE_Y, SHOULDER_Z)
    out, high = np.hypot(x, y), z + HAND
    square = out**2 + high**2
    bend = (square - UPPER_ARM**2 - FOREARM**2) / (2 * UPPER_ARM * FOREARM)
    pan, elbow = np.arctan2(x, -y), -np.arccos(np.clip(bend, -1, 1))
    lift = np.arctan2(high, out) - np.arctan2(FOREARM * np.sin(elbow), UPPER_ARM + FOREARM * np.cos(elbow))
    joints = np.degrees([pan, lift, elbow, -np.pi / 2 - lift - elbow, pan])
    if abs(bend) > 1 or (joints < LOW).any() or (joints > HIGH).any():
        raise ValueError(f"the arm does not reach {np.asarray(tip).tolist()} cm: its joints would be {joints.round(1)}")
    return joints


# ---- what an episode is made of -------------------------------------------------------------------------------------


def start(scene: Scene) -> np.ndarray:
    """The joints at the gripper's place in a scene, float32 (5,)."""
    return inverse(np.array(scene.start)).astype(np.float32)


def position(joints: np.ndarray) -> np.ndarray:
    """The hand's tip, float32 (3,) in cm."""
    return forward(joints)[0][-1].astype(np.float32)


def move(joints: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Turn every joint to its target, at most `MAX_DEG_PER_FRAME`; stay where that would press onto the table."""
    limit = np.float32(MAX_DEG_PER_FRAME)
    moved = joints + np.clip(target - joints, -limit, limit)
    return joints if forward(moved)[0][:, 2].min() < 0 else moved


def demonstrate(scene: Scene, colour: str) -> tuple[np.ndarray, np.ndarray]:
    """Move the hand straight to the bin of a colour at constant speed, and stay there for a moment.

    Returns:
        State and action, float32 (N, 5), in degrees: the joints, and their targets one frame later.
    """
    places = straight_path(scene.start, scene.place(colour), SPEED_CM_PER_FRAME, round(DWELL_S * FPS))
    path = np.array([inverse(place) for place in places], np.float32)
    return path[:-1], path[1:]


def render(scene: Scene, joints: np.ndarray) -> dict[str, np.ndarray]:
    """The two cameras' images, uint8 (H, W, 3) each.

    The overhead camera looks down on the table and the arm. The hand's hangs level under the hand, turns with it and
    sees only what is near.
    """
    points, axes = forward(joints)
    bins = squares_above(scene)
    overhead = draw(CAMERAS["overhead"], OVERHEAD_X, OVERHEAD_Y, bins)
    pan = np.radians(float(joints[0]))
    ahead_x, ahead_y = np.sin(pan), -np.cos(pan)
    x, y = _grid(CAMERAS["overhead"], OVERHEAD_X, OVERHEAD_Y)
    x, y = x - BASE_X, y - BASE_Y
    out, beside = x * ahead_x + y * ahead_y, x * ahead_y - y * ahead_x
    # From above, all links lie on one line.
    reach = points[:, 0] * ahead_x + (points[:, 1] - BASE_Y) * ahead_y
    beyond = np.maximum(np.maximum(reach.min() - out, out - reach.max()), 0)
    overhead[beyond**2 + beside**2 <= LINK_HALF_WIDTH**2] = COLOURS["gripper"]

    right_x, right_y = axes[:2, 0] / max(float(np.linalg.norm(axes[:2, 0])), 1e-9)
    across, up = _grid(CAMERAS["hand"], HAND_VIEW, HAND_VIEW)
    x, y = points[-1, 0] + across * right_x - up * right_y, points[-1, 1] + across * right_y + up * right_x
    hand = np.full((*CAMERAS["hand"], 3), COLOURS["table"], np.uint8)
    for bin_x, bin_y, half, colour in bins:
        hand[(np.abs(x - bin_x) <= half) & (np.abs(y - bin_y) <= half)] = COLOURS[colour]
    return {"overhead": overhead, "hand": hand}


def _grid(
    size: tuple[int, int], horizontal: tuple[float, float], vertical: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """The columns (1, W) and rows (H, 1) of an image in the scene, as `draw` has them."""
    height, width = size
    return np.linspace(*horizontal, width)[None], np.linspace(*vertical, height)[::-1, None]


ARM = Robot(
    robot_type="tabletop_arm",
    fps=FPS,
    dimensions=JOINTS,
    low=LOW,
    high=HIGH,
    cameras=CAMERAS,
    start=start,
    position=position,
    move=move,
    demonstrate=demonstrate,
    render=render,
)
