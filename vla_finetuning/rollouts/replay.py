"""Episodes to look at: played again from the actions that were recorded, with rendering on, as animated pictures.

An episode that ends in another state than it did is not shown as if it were that one.
"""

from __future__ import annotations

import contextlib
import io
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import ray
from PIL import Image

from vla_finetuning.envs.protocol import Maker, Observation, choose_gl, choose_initial_state, look_on_demand, state_hash
from vla_finetuning.run.failures import root_cause
from vla_finetuning.run.folder import FILMS

# Processes share a CPU as those that simulate do. The limit is for all pictures of an evaluation together.
FILM_CPUS, LIMIT_S = 0.5, 300.0
# Of a picture: enough to see what happens, few enough that a page with some dozens of them opens at once; and how long
# its last frame stays.
MAX_FRAMES, MAX_WIDTH, QUALITY, PAUSE_MS = 60, 240, 70, 1200


def film(make: Maker, line: Mapping[str, Any], actions: np.ndarray) -> bytes:
    """Play an episode again as an animated WebP of the environment's own view, at the speed it had.

    Runs in a Ray task. Of the formats that browsers play this is the smallest for rendered scenes.

    Args:
        make: the environment of its task. line, actions: as for `play_again`.
    Raises:
        NotRepeatedError: as `play_again`.
    """
    choose_gl()
    every = max(1, -(-len(actions) // (MAX_FRAMES - 1)))
    frames = []
    with make() as env:
        for moment in play_again(env, line, actions, lambda number: number % every == 0 or number == len(actions)):
            if moment.looked:
                frames.append(_seen(env, moment.observation))
        fps = env.metadata.get("render_fps") or 10
    pictures = [_small(frame) for frame in frames]
    milliseconds = [round(1000 * every / fps)] * (len(frames) - 1) + [PAUSE_MS]
    buffer = io.BytesIO()
    pictures[0].save(
        buffer, "WEBP", save_all=True, append_images=pictures[1:], duration=milliseconds, loop=0, quality=QUALITY
    )
    return buffer.getvalue()


class NotRepeatedError(ValueError):
    """An environment does not do again what it did: it began or ended in another state, or failed."""


@dataclass(frozen=True)
class Moment:
    """An environment after its reset, or after an action. `looked`: whether its images are of this moment."""

    observation: Observation
    looked: bool
    reward: float = 0.0
    over: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


def play_again(
    env: gymnasium.Env[Any, Any],
    line: Mapping[str, Any],
    actions: np.ndarray,
    look: Callable[[int], bool] = lambda number: True,
) -> Iterator[Moment]:
    """Play an episode again: its beginning, and what came of each of its actions.

    Args:
        line: the episode's. actions: all that were executed, (steps, A). look: whether to render after so many.
    Raises:
        NotRepeatedError: it began or ended in another state than the line says, or the environment raises.
    """
    look_on_demand(env, True)
    choose_initial_state(env, line["episode"])
    with _repeating():
        observation, info = env.reset(seed=line["seed"])
    _check("began", env, observation, line["initial_state"])
    yield Moment(observation, True, info=info)
    for number, action in enumerate(actions, 1):
        look_on_demand(env, looked := look(number))
        with _repeating():
            observation, reward, terminated, truncated, info = env.step(action)
        over = bool(terminated or truncated)
        if number == len(actions):
            _check("ended", env, observation, line["final_state"])
            if not over or bool(info.get("is_success", False)) != line["success_at_end"]:
                raise NotRepeatedError("played again it ended otherwise: the environment does not repeat")
        yield Moment(observation, looked, float(reward), over, info)


@contextlib.contextmanager
def _repeating() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise NotRepeatedError(f"played again its environment failed: {type(error).__name__}: {error}") from error


def _check(when: str, env: gymnasium.Env[Any, Any], observation: Any, expected: str) -> None:
    if expected and (state := state_hash(env, observation)) != expected:
        raise NotRepeatedError(
            f"played again it {when} in the state {state} instead of {expected}: the environment does not repeat, or "
            "is another version than the one that was evaluated in"
        )


def _seen(env: gymnasium.Env[Any, Any], observation: Any) -> np.ndarray:
    """The environment's own picture, uint8 (H, W, 3); the policy's cameras side by side where it has none."""
    if env.render_mode == "rgb_array":
        return np.asarray(env.render())
    pixels = observation["pixels"]
    images = list(pixels.values()) if isinstance(pixels, Mapping) else [pixels]
    height = max(image.shape[0] for image in images)
    return np.hstack([np.pad(image, ((0, height - len(image)), (0, 0), (0, 0))) for image in images])


def _small(frame: np.ndarray) -> Image.Image:
    picture, width = Image.fromarray(frame), min(frame.shape[1], MAX_WIDTH)
    return picture.resize((width, max(1, round(frame.shape[0] * width / frame.shape[1]))), Image.Resampling.LANCZOS)


def make_films(
    folder: Path,
    makers: Mapping[str, Maker],
    chosen: Sequence[tuple[str, Mapping[str, Any], np.ndarray]],
) -> list[dict[str, Any]]:
    """Write pictures of episodes into `folder`/films for a page (`report.loop`).

    Runs on the driver, joined to a cluster. An episode that cannot be shown says why, and costs nothing else.

    Args:
        makers: of each task's environment. chosen: (title, line, actions) of each.
    Returns:
        Of each: `{"title", "file", "instruction", "seed", "success", "steps", "texts": what the policy wrote,
        "problem": why there is no file}`.
    """
    (folder / FILMS).mkdir(parents=True, exist_ok=True)
    task = ray.remote(num_cpus=FILM_CPUS, max_retries=0)(film)
    tasks = [task.remote(makers[line["task"]], dict(line), actions) for _, line, actions in chosen]
    deadline, films = time.monotonic() + LIMIT_S, []
    for film_task, (title, line, _) in zip(tasks, chosen, strict=True):
        name = "-".join(re.sub(r"\W", "_", str(part))[:60] for part in (title, line["task"], line["seed"]))
        file, problem = f"{name}.webp", None
        if not ray.wait([film_task], timeout=max(0.0, deadline - time.monotonic()))[0]:
            ray.cancel(film_task, force=True)
            problem = f"playing it again took more than {LIMIT_S:g} s"
        else:
            try:
                (folder / FILMS / file).write_bytes(ray.get(film_task))
            except Exception as error:  # whatever an environment may end with
                problem = root_cause(error)
        shown = {key: line[key] for key in ("instruction", "seed", "steps")} | {"success": line["success_once"]}
        shown["texts"] = line.get("texts", [])
        films.append({"title": title, "file": None if problem else file, "problem": problem, **shown})
    return films
