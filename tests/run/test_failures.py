"""Which error ends a run at once, which at its second time, and which is tried again."""

import json
from unittest import mock

import pytest
import torch
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError
from ray.train import ControllerError, WorkerGroupError
from ray.train.constants import TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S as GROUP_TIMEOUT
from ray.train.torch import config as torch_config
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

from vla_finetuning.run.attempts import ATTEMPTS_NAME
from vla_finetuning.run.failures import StopRetrying, root_cause
from vla_finetuning.run.folder import LOG_NAME

PEER = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4312")
BAD_FILE = FileNotFoundError("dataset a: b.mp4 is missing")
NOT_MEMORY = RuntimeError("CUDA error: an illegal memory access was encountered")


def died():
    """Return Ray Train 2.60's error of a killed process."""
    return WorkerHealthCheckFailedError("A worker health check failed.", failure=ActorDiedError())


class Run:
    """A run's folder, in which attempts start and fail; `ends(...)` returns the error that ends the run."""

    def __init__(self, folder):
        self.folder, self.policy, self.number = folder, StopRetrying(folder), 0

    def ends(self, resumed_from, *errors):
        with open(self.folder / ATTEMPTS_NAME, "a") as file:
            line = {"attempt": self.number, "resumed_from_step": resumed_from, "world_size": len(errors)}
            file.write(json.dumps(line) + "\n")
        self.number += 1
        try:
            self.policy.after_exception(None, {rank: e for rank, e in enumerate(errors) if e is not None})
        except Exception as error:
            return error
        return None


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv(GROUP_TIMEOUT, "")  # so that it is gone again afterwards
    monkeypatch.delenv(GROUP_TIMEOUT)
    return Run(tmp_path)


@pytest.mark.parametrize(
    "cause", [ValueError("episode 3: truncated"), BAD_FILE, FloatingPointError("11 of the last 50 steps")]
)
@pytest.mark.parametrize("wrap", [lambda e: e, lambda e: RayTaskError("read", "traceback", e).as_instanceof_cause()])
def test_errors_of_own_checks_end_the_run_at_once(run, cause, wrap):
    raised = run.ends(0, PEER, wrap(cause))
    assert raised is cause
    assert (run.folder / LOG_NAME).read_text() == f"WARNING attempt from step 0 failed on rank 1: {cause}\n"
    assert root_cause(ControllerError(raised)) == str(cause)


def test_other_error_ends_the_run_if_repeated_from_one_checkpoint(run):
    of_memory = [torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {n} MiB") for n in (20, 22, 24)]
    assert run.ends(0, of_memory[0], None) is None
    assert run.ends(10, of_memory[1], None) is None  # it came further
    assert run.ends(10, NOT_MEMORY, None) is None
    assert run.ends(10, of_memory[1], None) is None  # another one was between
    assert run.ends(10, of_memory[2], PEER) is of_memory[2]
    assert run.ends(20, NOT_MEMORY, None) is None
    assert run.ends(20, PEER, died()) is None  # a death between does not count
    assert run.ends(20, NOT_MEMORY, None) is NOT_MEMORY


@pytest.mark.parametrize(
    "errors",
    [
        (died(), None),
        (died(), PEER),
        (PEER, None),  # the one that died has not been missed yet
        (died(), NOT_MEMORY),
        (RuntimeError("ncclRemoteError: a remote process exited"), None),
        (RayTaskError("read", "traceback", OutOfMemoryError("killed")).as_instanceof_cause(), None),
    ],
)
def test_errors_caused_by_process_death_are_retried(run, errors):
    assert [run.ends(4, *errors) for _ in range(5)] == [None] * 5


def test_unwritable_log_does_not_change_retries(run):
    (run.folder / LOG_NAME).mkdir()
    assert run.ends(0, BAD_FILE) is BAD_FILE
    assert run.ends(4, PEER, died()) is None


def test_root_cause_skips_consequential_errors():
    assert root_cause(WorkerGroupError("", {0: PEER, 1: KeyError("action")})) == "KeyError: 'action'"
    assert root_cause(AssertionError()) == "AssertionError: " and root_cause(ValueError()) == "ValueError: "
    assert root_cause(WorkerGroupError("", {0: died(), 1: PEER})).startswith("ActorDiedError: ")


@pytest.mark.parametrize("chosen", [None, 7])
def test_process_group_shutdown_is_short_after_a_failure(run, monkeypatch, chosen):
    """Processes are killed after a failure anyway; a user's timeout has precedence."""
    waited_s = []
    monkeypatch.setattr(torch_config.ray, "get", lambda futures, timeout: waited_s.append(timeout))
    if chosen:
        monkeypatch.setenv(GROUP_TIMEOUT, str(chosen))

    def group_ends():
        torch_config._TorchBackend().on_shutdown(mock.MagicMock(), torch_config.TorchConfig())

    for step in range(2):
        group_ends()
        run.ends(step, died())
        group_ends()
    assert waited_s == ([chosen] * 4 if chosen else [30, 1, 1, 1])
