"""ACT's loss with the mean over the valid steps of a whole step, against LeRobot's own of all rows at once."""

from types import SimpleNamespace

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.act.modeling_act import ACTPolicy

from tests.tiny import act_config
from util import DeviceMetrics
from vla_finetuning.policies.families.lerobot_forward import ACTLoss
from vla_finetuning.policies.family import MEAN_COUNT, PolicyLoss
from vla_finetuning.policies.processors import DeviceHalf

CHUNK, ROWS = 4, 4


def test_mean_over_parts_of_step_equals_lerobot_over_whole(monkeypatch):
    state = {
        "observation.state": PolicyFeature(FeatureType.STATE, (3,)),
        "observation.environment_state": PolicyFeature(FeatureType.ENV, (2,)),
    }
    config = act_config(state, 2, chunk_size=CHUNK, n_action_steps=CHUNK, latent_dim=4, dropout=0.0)
    torch.manual_seed(0)
    policy = ACTPolicy(config).double().train()
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)  # the latent is not drawn per row
    batch = {
        "observation.state": torch.randn(ROWS, 3).double(),
        "observation.environment_state": torch.randn(ROWS, 2).double(),
        "action": torch.randn(ROWS, CHUNK, 2).double(),
        "action_is_pad": torch.arange(CHUNK)[None] >= torch.tensor([4, 4, 1, 2])[:, None],
    }
    expected, _ = policy.forward(batch)
    loss = ACTLoss(policy, images=DeviceHalf(None, config))
    parts = [{key: value[rows] for key, value in batch.items()} for rows in (slice(0, 2), slice(2, 4))]
    mean_count = torch.stack([loss.count(part) for part in parts]).double().mean()
    actual = [loss({**part, MEAN_COUNT: mean_count}) for part in parts]
    torch.testing.assert_close(sum(actual) / 2, expected)
    assert (sum(loss(part) for part in parts) / 2 - expected).abs() > 1e-3  # differs without MEAN_COUNT


def test_policy_metrics_do_not_replace_metrics_of_training_loop():
    loss = SimpleNamespace(metrics=DeviceMetrics(torch.device("cpu")), training=True)
    PolicyLoss.add_metrics(loss, {"eval_loss": 0.1, "loss": 2.0, "l1_loss": torch.tensor([3.0]), "text": "x"})
    line, _ = loss.metrics.gather({"waited_s": 0.0})
    assert line["l1_loss"] == 3.0 and "eval_loss" not in line and np.isnan(line["loss"])
