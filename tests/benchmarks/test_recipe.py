"""The comparison of recipes: odd cameras are what they are called, and unseen frames are demonstrations."""

import numpy as np

from benchmarks import recipe
from vla_finetuning.envs.two_bins_scene import INSTRUCTIONS


def test_cameras_are_moved_and_recoloured():
    image = np.random.default_rng(0).integers(0, 256, (2, 40, 60, 3), np.uint8)
    moved = recipe.shifted(image)
    assert np.array_equal(moved[:, 2:, 3:], image[:, :-2, :-3]) and np.array_equal(moved[:, 0, 3:], image[:, 0, :-3])
    light = recipe.recoloured(image)
    assert light.dtype == np.uint8 and light.shape == image.shape and (light[..., 2] <= 0.6 * image[..., 2]).all()


def test_unseen_frames_are_demonstrations_with_whole_chunks():
    first = next(recipe.unseen(1, recipe.as_they_are))
    states, actions = first["observation.state"], first["action"]
    assert actions.shape == (len(states), recipe.DEMO_CHUNK_SIZE, 3) and first["task"][0] == INSTRUCTIONS["red"]
    np.testing.assert_array_equal(actions[0, 0], states[1])
    assert first["action_is_pad"].sum() == sum(range(recipe.DEMO_CHUNK_SIZE)) and not first["action_is_pad"][0].any()
