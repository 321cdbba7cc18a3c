"""What tests of broken runs share: a small dataset, a policy, and the program on them, in this process or another."""

import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial

import pytest
import ray
import torch
from safetensors.torch import load_file

import vla
from tests import clusters, planted
from tests.datasets import make_dataset
from tests.tiny import make_base
from vla_finetuning.buckets.mirror import fetched
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.run.folder import attempts

STEPS, SAVE_FREQ = 20, 4


def make_setting(folder, episodes=(12, 7, 15, 1, 10, 9)):
    """A folder, with a dataset and a policy."""
    root = make_dataset(folder / "dataset", episodes=episodes)
    return folder, root, make_base(folder / "base", load_metadata(root), chunk_size=8)


def flags(setting, output_dir, **changes):
    """Of a run with two workers. output_dir: a path, an address, or a name in the setting's folder."""
    folder, root, base = setting
    options = {
        "dataset.root": root,
        "policy.path": base,
        "output_dir": output_dir if "://" in str(output_dir) else folder / output_dir,
        "scaling.num_workers": 2,
        "scaling.cpus_per_worker": 0.5,
        "scaling.max_failures": 0,
        "scaling.use_gpu": "false",  # some join a cluster
        "batch_size": 3,
        "steps": STEPS,  # 2.2 epochs of 54 rows
        "log_freq": 1,
        "save_freq": SAVE_FREQ,
        "lr": 1e-3,
        "train.mode": "full",
        "train.deterministic": "true",
        "run.record_rows": "true",
        **changes,
    }
    return [f"--{k}={v}" for k, v in options.items()]


def run_with(argv, *faults):
    """The program, with faults in its training processes or its data. Returns its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vla, "make_trainer", partial(planted.make_trainer, faults=faults))
        return vla.main(argv)


DRIVER = """
import json
import os
import sys
from collections import Counter
from functools import partial
import vla
from tests.planted import Fault, make_trainer
from tests.planted_data import DataFault
from vla_finetuning.run import lease
from vla_finetuning.training import coordinators, fitting
fitting.RESIZE_INTERVAL_S = float(os.environ.get("TEST_RESIZE_S", fitting.RESIZE_INTERVAL_S))
coordinators.RANKS_PER_COORDINATOR = int(os.environ.get("TEST_RANKS", coordinators.RANKS_PER_COORDINATOR))
lease.LEASE_S, lease.RENEW_S = json.loads(os.environ.get("TEST_LEASE", f"[{lease.LEASE_S}, {lease.RENEW_S}]"))
vla.make_trainer = partial(make_trainer, faults=eval(sys.argv[1]))
sys.exit(vla.main(sys.argv[2:]))
"""


def started(argv, *faults, address=None, **environment):
    """The program in a process of its own, joining the tests' cluster, another, or ("local") one of its own."""
    address = address or ray.get_runtime_context().gcs_address
    environment = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": str(clusters.ROOT), **environment}
    command = [sys.executable, "-c", DRIVER, repr(list(faults)), *map(str, argv)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def short_folder():
    """For a cluster of its own: Ray puts Unix sockets there, whose paths must be short."""
    path = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def weights(output_dir):
    """Of the policy that a run has exported."""
    with fetched(output_dir / "pretrained_model") as folder:
        return load_file(folder / "model.safetensors")


def assert_same_weights(folder, other):
    expected, found = weights(other), weights(folder)
    assert expected.keys() == found.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def resumed_from(folder):
    return [line["resumed_from_step"] for line in attempts(folder)]
