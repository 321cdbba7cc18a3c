"""Films of replayed episodes, which are refused if the replay differs."""

import io
from functools import partial
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from PIL import Image

from vla_finetuning.envs import two_bins
from vla_finetuning.envs.two_bins_scene import COLOURS, demonstrate
from vla_finetuning.rollouts import replay
from vla_finetuning.rollouts.replay import MAX_FRAMES, MAX_WIDTH, NotRepeatedError, film

CAMERAS_ONLY = partial(gymnasium.make, two_bins.GYM_ID, max_episode_steps=500)
MAKE = partial(CAMERAS_ONLY, render_mode="rgb_array")


@pytest.fixture(scope="module")
def episode():
    """Return an episode's line, its actions, and its rendered views."""
    with MAKE() as env:
        env.reset(seed=5)
        line, views = {"seed": 5, "episode": 0, "initial_state": env.unwrapped.state_hash()}, [env.render()]
        _, actions = demonstrate(env.unwrapped._scene, env.unwrapped.task)
        for action in actions:
            *_, info = env.step(action)
            views.append(env.render())
        line |= {"final_state": env.unwrapped.state_hash(), "success_at_end": info["is_success"]}
    return line, actions, views


def frames_of(webp):
    with Image.open(io.BytesIO(webp)) as image:
        assert image.format == "WEBP" and image.is_animated and image.info["loop"] == 0
        for number in range(image.n_frames):
            image.seek(number)
            yield np.asarray(image.convert("RGB")), image.info["duration"]


def test_film_shows_every_step_at_recorded_speed(episode):
    line, actions, views = episode
    frames, durations = zip(*frames_of(film(MAKE, line, actions)), strict=True)
    # Frames that show the same are one in the file.
    assert 10 < len(frames) <= len(views)
    assert sum(durations[:-1]) <= 100 * len(actions) <= sum(durations)
    for picture, expected in ((frames[0], views[0]), (frames[-1], views[-1])):
        assert picture.shape == (round(len(expected) * MAX_WIDTH / expected.shape[1]), MAX_WIDTH, 3)
        exact = np.asarray(Image.fromarray(expected).resize(picture.shape[1::-1]))
        assert np.abs(picture.astype(int) - exact).mean() < 4
    assert np.abs(frames[0].astype(int) - frames[-1]).max() > 50
    assert (np.abs(frames[-1].astype(int) - COLOURS["table"]).max(axis=2) < 10).mean() > 0.5


def test_film_of_long_episode_is_limited_in_frames(episode):
    line, actions, _ = episode
    back_and_forth = np.concatenate([actions[:8], actions[:8][::-1]] * 20)
    make = partial(MAKE, max_episode_steps=len(back_and_forth))
    frames = list(frames_of(film(make, {**line, "final_state": "", "success_at_end": False}, back_and_forth)))
    assert MAX_FRAMES / 2 < len(frames) <= MAX_FRAMES
    assert sum(duration for _, duration in frames) >= 100 * (len(back_and_forth) - 10)


@pytest.mark.parametrize("when", ["initial_state", "final_state"])
def test_replay_with_other_states_is_refused(episode, when):
    line, actions, _ = episode
    with pytest.raises(ValueError, match=f"{'began' if when == 'initial_state' else 'ended'} in the state .* instead"):
        film(MAKE, {**line, when: "0" * 16}, actions)


def test_replay_with_other_outcome_is_refused_without_state_hash(episode):
    line, actions, _ = episode
    for other, executed in (({"success_at_end": False}, actions), ({"success_at_end": False}, actions[:5])):
        with pytest.raises(NotRepeatedError, match="ended differently"):
            film(MAKE, {**line, "final_state": "", **other}, executed)


def test_film_uses_cameras_without_rendered_view(episode):
    line, actions, _ = episode
    (first, _), *_ = frames_of(film(CAMERAS_ONLY, line, actions))
    assert first.shape == (64, 96 + 56 + 48, 3)


def test_environment_without_cameras_and_render_mode_cannot_be_filmed():
    env = SimpleNamespace(render_mode=None, render=lambda: None)
    with pytest.raises(ValueError, match="shows no camera, and has no render_mode"):
        replay._view(env, {"agent_pos": np.zeros(3)})
    env.render = lambda: np.ones((4, 4, 3), np.uint8)  # as Meta-World, whatever its render_mode
    assert replay._view(env, {"agent_pos": np.zeros(3)}).all()
