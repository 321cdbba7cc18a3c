"""The comparison of recipes: odd cameras are what they are called, and unseen frames are demonstrations."""

import json

import numpy as np
import pytest

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


@pytest.mark.slow  # a dataset, and two trainings of a tiny policy that then plays
def test_all_of_it_adds_to_what_was_measured_before(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "EPISODES", 2)
    monkeypatch.setattr(recipe, "OPEN_LOOP_SCENES", 1)
    path = tmp_path / "found.json"
    flags = ["--seeds=1", "--steps=2", "--rows=4", f"--json={path}"]
    assert recipe.main([*flags, "--kinds=none"]) == recipe.main([*flags, "--kinds=openpi"]) == 0
    results = json.loads(path.read_text())["results"]
    assert [(r["kind"], r["weights"]) for r in results] == [
        (kind, weights) for kind in ("none", "openpi") for weights in ("weights", "average")
    ]
    assert all(m["open_loop"] > 0 and 0 <= m["successes"] <= 2 for r in results for m in r["measured"].values())
    errors = [r["measured"]["as they are"]["open_loop"] for r in results]
    assert len(set(errors)) == 4  # another recipe, another policy
    assert recipe.main([*flags[:1], "--steps=3", *flags[2:]]) == 2
