"""What every test stands on: a hermetic environment, and a local Ray cluster for the modules that ask."""

import gc
import os
import shutil
import stat
import sys
import tempfile

import hypothesis
import pytest

# Ray, torch and huggingface_hub read their environment once, when first imported, and their child processes
# inherit it: so it is set here, before any of them. HF_HOME is a folder of this run's own: the user's token
# and cached datasets must neither help a test nor be touched by it.
_HF_HOME = tempfile.mkdtemp(prefix="vla-tests-hf-")
_NUMBERS_DIR = tempfile.mkdtemp(prefix="vla-tests-numbers-")
# There Ray remembers the cluster that is to be joined: neither the user's nor another test process's. Short: Ray's
# sockets lie within, and the names of those are bounded.
_RAY_DIR = tempfile.mkdtemp(prefix="r-", dir=os.environ.get("RAY_TMPDIR"))
_OWN = [_HF_HOME, _NUMBERS_DIR, _RAY_DIR]
# Of datasets that all processes of `make test` share: the first of them, which starts the others, makes and removes it.
if "TEST_DATASETS_DIR" not in os.environ:
    os.environ["TEST_DATASETS_DIR"] = tempfile.mkdtemp(prefix="vla-tests-datasets-")
    _OWN.append(os.environ["TEST_DATASETS_DIR"])
for _name in [name for name in os.environ if name.startswith("HF_")]:
    del os.environ[_name]
os.environ.update(
    HF_HOME=_HF_HOME,
    HF_HUB_OFFLINE="1",
    VLA_NUMBERS_DIR=_NUMBERS_DIR,
    RAY_TMPDIR=_RAY_DIR,
    TOKENIZERS_PARALLELISM="false",
    # Two train workers and the read tasks share the cores; one thread each also keeps sums in one order.
    OMP_NUM_THREADS="1",
    AWS_EC2_METADATA_DISABLED="true",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_DATA_DISABLE_PROGRESS_BARS="1",
    # What an execution that was cut short had asked for is not given to the next one before that (180 s).
    RAY_DATA_AUTOSCALING_REQUEST_EXPIRE_TIME_S="30",
    # At Ray's own 15, the other test process would leave it next to nothing.
    RAY_worker_niceness="0",
    # Ray ends idle processes for which no CPU is free; the next task would import LeRobot anew.
    RAY_num_workers_soft_limit="3",
    # Ray 2.60: without GPUs, leave CUDA_VISIBLE_DEVICES alone (its next default) instead of warning of it.
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
)
os.environ.pop("RAY_ADDRESS", None)

# What is imported while tests are collected is never garbage, and looking through it takes seconds.
gc.disable()

# The same examples in every run, and no deadline: a busy machine is not a bug.
hypothesis.settings.register_profile("deterministic", derandomize=True, deadline=None, database=None, max_examples=75)
hypothesis.settings.load_profile("deterministic")


def pytest_unconfigure(config):
    if "tests.clusters" in sys.modules:
        sys.modules["tests.clusters"].stop()
    if "tests.buckets" in sys.modules:
        sys.modules["tests.buckets"].forget()  # lines for servers that are gone would be tried for a minute
    for folder in _OWN:
        shutil.rmtree(folder, ignore_errors=True)


def pytest_runtest_teardown():
    """Undo what SVT-AV1 does to root's process in whose main thread it runs: real-time priority."""
    if hasattr(os, "sched_setscheduler") and os.sched_getscheduler(0) != os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """Put those together that share what is dear. Skip tests marked `gpu` where there is no CUDA device.

    In two processes (`make test`), one has all tests that start Ray, first those that share a cluster: two clusters at
    once would need more memory than a laptop has. The other has the files with ranks, which are forked from one process
    that has imported everything. Of the rest, a file stays in one process.
    """

    def shares(item):
        return "ray_cluster" in item.fixturenames

    def starts_ray(item):
        return shares(item) or item.get_closest_marker("ray") is not None

    def group(item):
        if starts_ray(item):
            return "ray"
        return "ranks" if hasattr(item.module, "in_ranks") else item.path.name

    # The longest come early: else one process is alone with them in the end.
    first = {"ray": 0, "ranks": 1}
    items.sort(key=lambda item: (first.get(group(item), 2), not shares(item), "training" not in item.path.parts))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish():
    """Have the collector look at no import again. Count the FLOPs of equal policies once: most of a plan's time."""
    gc.freeze()
    gc.enable()
    counting = sys.modules.get("vla_finetuning.policies.counting")
    if counting is None:
        return
    counts, count = {}, counting.flops_per_sample
    without_flops = ("pretrained_path", "repo_id", "n_action_steps", "action_feature_names", "normalization_mapping")
    without_flops += ("vocabulary", "input_features", "output_features", "optimizer_", "scheduler_")

    def flops_per_sample(policy, *options):
        config = getattr(policy, "config", policy)
        made_of = {name: value for name, value in vars(config).items() if not name.startswith(without_flops)}
        made_of["words"] = len(getattr(config, "vocabulary", ()))
        features = [*(config.input_features or {}).values(), *(config.output_features or {}).values()]
        made_of["features"] = [(feature.type, feature.shape) for feature in features]
        key = repr((type(config), made_of, options))
        if key not in counts:
            counts[key] = count(policy, *options)
        return counts[key]

    for module in (counting, sys.modules.get("vla_finetuning.rl.expected")):
        if module is not None:
            module.flops_per_sample = flops_per_sample


@pytest.fixture(scope="module")
def ray_cluster():
    """A local Ray cluster of 3 logical CPUs, shared by all modules that ask for it (their tests run side by side).

    A module whose cluster must be another, or inherit more of the environment, starts its own: `clusters.start`.
    """
    import ray

    from tests import clusters

    if not ray.is_initialized():
        clusters.start(forked=True)


@pytest.fixture(scope="module")
def no_ray_cluster():
    """For tests that start a cluster in their own way, or must not find one."""
    from tests import clusters

    clusters.stop()


@pytest.fixture(scope="module")
def faults():
    """What is done to requests to the bucket `runs`, which is there for this module."""
    from tests.buckets import runs_bucket

    with runs_bucket() as faults:
        yield faults


@pytest.fixture
def googles_faults(tmp_path, monkeypatch):
    """Serve Google's store, with an empty bucket `runs`; what is done to requests for it."""
    from tests.loopback import Faults, GoogleStorage, Proxy, serving

    (tmp_path / "runs").mkdir()
    faults = Faults()
    with serving(GoogleStorage("runs", tmp_path / "runs")) as endpoint, serving(Proxy(endpoint, faults)) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy)
        yield faults


@pytest.fixture
def bucket_url(faults, request, tmp_path, monkeypatch):
    """Return a run's address. Requests are repeated at once, and this node's disk is the test's."""
    from tests.buckets import forget
    from vla_finetuning.buckets import store

    faults.choose, faults.ignored, faults.delay_s = lambda request: None, (), 0.0
    faults.requests.clear()
    monkeypatch.setattr(store, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    forget()
    yield f"s3://runs/{request.node.name}/run"
    faults.choose = lambda request: None
    forget()


@pytest.fixture(params=[0o022, 0o027], ids=["umask 022", "umask 027"])
def assert_usual_permissions(request):
    """Sets the umask, and checks that a folder, and everything in it, has the permissions that the umask gives."""
    before = os.umask(request.param)

    def check(folder):
        for path in (folder, *folder.rglob("*")):
            usual = (0o777 if path.is_dir() else 0o666) & ~request.param
            assert oct(stat.S_IMODE(path.stat().st_mode)) == oct(usual), path

    yield check
    os.umask(before)
