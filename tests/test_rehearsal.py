"""A rehearsal on a real robot's episodes: what a user does before renting GPUs, from a look to the exported policy."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors

import vla
from diagnostics import show_dataset
from vla_finetuning.config import REHEARSAL_STEPS
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.flags import parse_args

REAL = Path(__file__).resolve().parents[2] / "shared/real/g1_inspire_v21"


@pytest.mark.parametrize(
    ("argv", "frames", "steps"),
    [
        (["--dataset.root=x"], 1_461, 300),
        (["--dataset.root=x"], 31_000, 969),
        (["--dataset.repo_id=x/y"], 10**6, 1_000),
        (["--dataset.root=x", "--steps=300"], 31_000, 300),
        (["--dataset.root=x", "--num_epochs=1"], 6_400, 100),
        ([], 31_000, 300),
    ],
)
def test_a_rehearsal_is_as_long_as_its_dataset_asks_for(argv, frames, steps):
    assert parse_args(["--preset", "demo", *argv]).resolve_steps(frames) == steps


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not REAL.exists(), reason="shared/real is not there")
def test_a_rehearsal_on_a_real_robots_episodes(tmp_path, capsys, no_ray_cluster):
    """A Unitree G1's, v2.1, 26 joints: better than the mean action on the held-out episode, and loaded by LeRobot."""
    assert show_dataset.main([str(REAL), "--output", str(tmp_path / "dataset.html")]) == 0
    folder = tmp_path / "run"
    assert vla.main(["--preset=demo", f"--dataset.root={REAL}", f"--output_dir={folder}"]) == 0
    assert f"Steps        {REHEARSAL_STEPS[0]} (" in capsys.readouterr().out
    errors = json.loads((folder / "evaluation.json").read_text())
    assert errors["trained"]["policy"]["mse"] < 0.9 * errors["trained"]["mean_action"]["mse"]

    exported = folder / "pretrained_model"
    config = PreTrainedConfig.from_pretrained(exported)
    policy = get_policy_class(config.type).from_pretrained(exported)
    pre, post = make_pre_post_processors(config, str(exported))
    feature = load_metadata(REAL).features["action"]
    batch = {
        "observation.state": torch.zeros(26),
        "observation.images.cam_high": torch.zeros(3, 480, 640),
        "task": "Pick up the yellow bottle on the table.",
    }
    actions = post(policy.predict_action_chunk(pre(batch))).numpy()
    assert actions.shape[-1] == feature.shape[0] and np.isfinite(actions).all()
