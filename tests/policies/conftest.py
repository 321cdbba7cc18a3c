"""What tests of several policies need."""

import os

import pytest
import torch.distributed as dist


@pytest.fixture
def process_group(tmp_path):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
