"""What every test stands on: a hermetic environment, and a local Ray cluster for the modules that ask."""

import os
import shutil
import tempfile
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent

# Ray, torch and huggingface_hub read their environment once, when first imported, and their child processes
# inherit it: so it is set here, before any of them. HF_HOME is a folder of this run's own: the user's token
# and cached datasets must neither help a test nor be touched by it.
_HF_HOME = tempfile.mkdtemp(prefix="vla-tests-hf-")
for _name in [name for name in os.environ if name.startswith("HF_")]:
    del os.environ[_name]
os.environ.update(
    HF_HOME=_HF_HOME,
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    # Two train workers and the read tasks share the cores; one thread each also keeps sums in one order.
    OMP_NUM_THREADS="1",
    AWS_EC2_METADATA_DISABLED="true",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_DATA_DISABLE_PROGRESS_BARS="1",
    # Ray 2.60: without GPUs, leave CUDA_VISIBLE_DEVICES alone (its next default) instead of warning of it.
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
)
os.environ.pop("RAY_ADDRESS", None)

# The same examples in every run, and no deadline: a busy machine is not a bug.
hypothesis.settings.register_profile("deterministic", derandomize=True, deadline=None, database=None, max_examples=150)
hypothesis.settings.load_profile("deterministic")


def pytest_unconfigure(config):
    shutil.rmtree(_HF_HOME, ignore_errors=True)


def pytest_collection_modifyitems(items):
    """Skip tests marked `gpu` where there is no CUDA device."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="module")
def ray_cluster():
    """A local Ray cluster of 4 logical CPUs for one test module, gone after it.

    4 logical CPUs whatever the machine has: two train workers and the read tasks beside them must all be
    schedulable at once. Its processes inherit the environment as it is when the fixture starts, so a module
    that needs more of it (S3 credentials, say) sets that in a module-scoped fixture which runs earlier.
    """
    import ray

    # Ray puts Unix sockets under this folder, and their paths may have no more than about 100 characters:
    # the temporary folder of macOS is too long for that.
    temp_dir = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    with pytest.MonkeyPatch.context() as environment:
        # Workers find the top-level modules wherever pytest was started from.
        environment.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
        ray.init(
            address="local",
            num_cpus=4,
            object_store_memory=10**9,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=temp_dir,
        )
    yield
    ray.shutdown()
    shutil.rmtree(temp_dir, ignore_errors=True)
