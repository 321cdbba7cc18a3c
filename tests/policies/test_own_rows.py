"""Rows of robots that differ, in one batch: each one's loss is that of a batch that has its cameras and dimensions."""

import pytest
import torch

from tests.policies import test_pi0, test_smolvla
from tests.tiny import make_batch, make_policy
from tests.tiny_backbones import smolvlm
from vla_finetuning.columns import ACTION_DIMS, IS_PRESENT
from vla_finetuning.policies.registry import family_of


def pi05(_):
    policy = make_policy(2)
    return policy, *make_batch(policy, 3)


def pi0(_):
    policy = test_pi0.make_policy(2)
    return policy, *test_pi0.make_batch(policy, 3)


def smolvla(folder):
    policy = test_smolvla.make_policy(smolvlm(folder, layers=4))
    return policy, *test_smolvla.make_batch(policy)


@pytest.mark.parametrize("make", [pi05, pi0, smolvla], ids=lambda make: make.__name__)
def test_a_row_without_a_camera_is_as_in_a_batch_without_it(make, tmp_path):
    policy, batch, noise, time = make(tmp_path)
    loss = family_of(policy.config).make_loss(policy)
    camera = list(policy.config.image_features)[1]
    present = torch.tensor([True, False, True])
    image = (batch[camera] * present[:, None, None, None]).requires_grad_()
    with_mask = loss({**batch, camera: image, camera + IS_PRESENT: present}, noise, time, per_row=True)
    with torch.no_grad():
        whole = loss(batch, noise, time, per_row=True)
        without = loss({key: value for key, value in batch.items() if key != camera}, noise, time, per_row=True)
    torch.testing.assert_close(with_mask, torch.where(present, whole, without), rtol=2e-5, atol=2e-6)
    assert (whole - without).abs().min() > 1e-4
    for parameter in policy.parameters():
        parameter.requires_grad_(True)
    family_of(policy.config).make_loss(policy)(
        {**batch, camera: image, camera + IS_PRESENT: present}, noise, time
    ).backward()
    of_row = image.grad.abs().sum(dim=(1, 2, 3))
    assert not of_row[1] and of_row[0] > 0 and of_row[2] > 0


@pytest.mark.parametrize("make", [pi05, pi0, smolvla], ids=lambda make: make.__name__)
def test_a_rows_loss_is_over_its_own_dimensions(make, tmp_path):
    policy, batch, noise, time = make(tmp_path)
    loss = family_of(policy.config).make_loss(policy)
    dims = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    own = loss({**batch, ACTION_DIMS: dims}, noise, time, per_row=True)
    losses = {width: dims.sum(dim=1) == width for width in (1, 2, 3)}
    actions = policy.config.output_features["action"]
    for width, rows in losses.items():
        narrow = type(actions)(actions.type, (width,))
        policy.config.output_features["action"] = narrow
        alone = loss(batch, noise, time, per_row=True)
        torch.testing.assert_close(own[rows], alone[rows], rtol=2e-5, atol=2e-6)
    policy.config.output_features["action"] = actions
    torch.testing.assert_close(loss({**batch, ACTION_DIMS: dims}, noise, time, per_row=True).mean(), own.mean())
