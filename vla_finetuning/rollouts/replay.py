"""Replay episodes from their recorded actions with rendering on, and write them as animated WebP films.

A replay that starts or ends in another state than the episode raises an error and is not shown.
"""

from __future__ import annotations

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

# CPUs of a task, as of a stage; and the time limit for all films of an evaluation together.
FILM_CPUS, LIMIT_S = 0.5, 300.0
# Limits of a film, so that a page with dozens of them still opens quickly; PAUSE_MS: duration of the last frame.
MAX_FRAMES, MAX_WIDTH, QUALITY, PAUSE_MS = 60, 240, 70, 1200


def film(make: Maker, line: Mapping[str, Any], actions: np.ndarray) -> bytes:
    """Replay an episode as an animated WebP of the environment's own view, in real time. Runs in a Ray task.

    WebP is the smallest format for rendered scenes that browsers play. Raises as `play_again`.
    """
    choose_gl()
    every = max(1, -(-len(actions) // (MAX_FRAMES - 1)))
    frames = []
    with make() as env:
        for moment in play_again(env, line, actions, lambda number: number % every == 0 or number == len(actions)):
            if moment.rendered:
                frames.append(_view(env, moment.observation))
        fps = env.metadata.get("render_fps") or 10
    pictures = list(map(Image.fromarray, frames))
    for picture in pictures:
        picture.thumbnail((MAX_WIDTH, picture.height), Image.Resampling.LANCZOS, reducing_gap=None)
    milliseconds = [round(1000 * every / fps)] * (len(frames) - 1) + [PAUSE_MS]
    buffer = io.BytesIO()
    pictures[0].save(
        buffer, "WEBP", save_all=True, append_images=pictures[1:], duration=milliseconds, loop=0, quality=QUALITY
    )
    return buffer.getvalue()


class NotRepeatedError(ValueError):
    """A replay started or ended in another state than the episode."""


@dataclass(frozen=True)
class Moment:
    """An environment after its reset or after an action; `rendered`: whether this step was rendered."""

    observation: Observation
    rendered: bool
    reward: float = 0.0
    over: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


def play_again(
    env: gymnasium.Env[Any, Any],
    line: Mapping[str, Any],
    actions: np.ndarray,
    renders: Callable[[int], bool] = lambda number: True,
) -> Iterator[Moment]:
    """Replay a line's episode from all executed actions, (steps, A); yield the moment after its reset and each action.

    `renders` says after which numbers of actions to render. Raises NotRepeatedError if the replay starts or ends in
    another state than the line says, and what the environment raises.
    """
    look_on_demand(env, True)
    choose_initial_state(env, line["episode"])
    observation, info = env.reset(seed=line["seed"])
    _check("began", env, observation, line["initial_state"])
    yield Moment(observation, True, info=info)
    for number, action in enumerate(actions, 1):
        look_on_demand(env, rendered := renders(number))
        observation, reward, terminated, truncated, info = env.step(action)
        over = bool(terminated or truncated)
        if number == len(actions):
            _check("ended", env, observation, line["final_state"])
            if not over or bool(info.get("is_success", False)) != line["success_at_end"]:
                raise NotRepeatedError("the replay ended differently: the environment does not repeat")
        yield Moment(observation, rendered, float(reward), over, info)


def _check(when: str, env: gymnasium.Env[Any, Any], observation: Any, expected: str) -> None:
    if expected and (state := state_hash(env, observation)) != expected:
        raise NotRepeatedError(
            f"played again it {when} in the state {state} instead of {expected}: the environment does not repeat, or "
            "is another version than the one that was evaluated in"
        )


def _view(env: gymnasium.Env[Any, Any], observation: Any) -> np.ndarray:
    """Return the environment's own view, uint8 (H, W, 3), or else the policy's cameras side by side."""
    if env.render_mode == "rgb_array" or "pixels" not in observation:
        if (view := env.render()) is None:
            raise ValueError("the environment shows no camera, and has no render_mode 'rgb_array'")
        return np.asarray(view)
    pixels = observation["pixels"]
    images = list(pixels.values()) if isinstance(pixels, Mapping) else [pixels]
    height = max(image.shape[0] for image in images)
    return np.hstack([np.pad(image, ((0, height - len(image)), (0, 0), (0, 0))) for image in images])


def make_films(
    folder: Path, makers: Mapping[str, Maker], chosen: Sequence[tuple[str, Mapping[str, Any], np.ndarray]]
) -> list[dict[str, Any]]:
    """Write films of episodes into `folder`/films for a report. Runs on the driver, joined to a cluster.

    Args:
        chosen: title, line and actions of each episode.

    Returns:
        One dict per episode: `{"title", "file", "instruction", "seed", "success", "steps", "texts": texts of the
        policy, "problem": why there is no file}`.
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
            except Exception as error:  # an environment may raise anything
                problem = root_cause(error)
        shown = {key: line[key] for key in ("instruction", "seed", "steps")}
        shown |= {"success": line["success_once"], "texts": line.get("texts", [])}
        films.append({"title": title, "file": None if problem else file, "problem": problem, **shown})
    return films
