"""Fixtures shared by the tests of policies."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.tiny_backbones import smolvlm


@pytest.fixture
def process_group(tmp_path):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def in_float64(monkeypatch):
    """Double precision, where rounding hides no mistake: casts to float32 in anybody's code become casts to float64."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.fixture(scope="session")
def backbone(tmp_path_factory):
    """Options of SmolVLA for a tiny SmolVLM of four layers."""
    return smolvlm(tmp_path_factory.mktemp("smolvla"), layers=4)
