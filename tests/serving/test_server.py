"""Start and stop of a server, with a stand-in for Ray Serve."""

import asyncio
import os
import signal
from types import SimpleNamespace

import pytest
from ray.serve.schema import ApplicationStatus

from tests.serving.servers import make_service
from vla_finetuning.serving import server
from vla_finetuning.serving.server import describe_service


class Serve:
    """Stand-in for Ray Serve: applications by name, all with one status."""

    RunTarget = staticmethod(lambda application, name, route_prefix: SimpleNamespace(name=name))

    def __init__(self, status):
        self.status_of_all, self.running, self.names = status, {}, []

    def start(self, **options):
        pass

    def run_many(self, targets, *, wait_for_applications_running):
        assert not wait_for_applications_running
        (name,) = (target.name for target in targets)
        self.names.append(name)
        self.running[name] = SimpleNamespace(status=self.status_of_all, message="no module named x", deployments={})
        return [None]

    def status(self):
        return SimpleNamespace(applications=self.running)

    def delete(self, name):
        del self.running[name]


@pytest.fixture
def ray_serve(monkeypatch):
    """Replace Serve by one whose cluster has both CPUs occupied."""
    stand_in = Serve(ApplicationStatus.DEPLOYING)
    monkeypatch.setattr(server, "serve", stand_in)
    context = SimpleNamespace(get_node_id=lambda: "node")
    resources = {"available_resources": dict, "cluster_resources": lambda: {"CPU": 2.0}}
    monkeypatch.setattr(server, "ray", SimpleNamespace(get_runtime_context=lambda: context, **resources))
    monkeypatch.setattr(server.cluster, "is_local", lambda: True)
    return stand_in


def test_servers_of_one_cluster_use_separate_applications(service, ray_serve):
    async def two():
        async with server.running(service), server.running(service):
            assert len(ray_serve.running) == 2

    ray_serve.status_of_all = ApplicationStatus.RUNNING
    asyncio.run(two())
    assert not ray_serve.running


def test_announced_chunk_size_follows_n_action_steps(service):
    fewer = make_service(service.sources[""].folder, "--policy.n_action_steps=3")
    assert fewer.interfaces[""].describe()["chunk_size"] == 3 and "to 3 actions of" in describe_service(fewer)[0]


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (ApplicationStatus.DEPLOYING, "1 replicas with 1 CPU each have not started .* 0 of 2 CPUs and 0 of 0 GPUs are"),
        (ApplicationStatus.DEPLOY_FAILED, "the replicas do not start: no module named x"),
    ],
)
def test_failed_replica_start_raises_and_frees_resources(service, ray_serve, monkeypatch, status, message):
    async def start():
        async with server.running(service):
            pass

    monkeypatch.setenv("VLA_NODES_TIMEOUT_S", "0.5")
    ray_serve.status_of_all = status
    with pytest.raises(RuntimeError, match=message):
        asyncio.run(asyncio.wait_for(start(), 60))
    assert ray_serve.names and not ray_serve.running


def test_signal_ends_the_wait_for_replicas(service, ray_serve, monkeypatch):
    async def stop():
        serving = asyncio.ensure_future(server.serve_until_stopped(service))
        while not ray_serve.running:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(serving, 60)

    monkeypatch.setattr(server, "TELL_AFTER_S", 1e9)
    asyncio.run(stop())
    assert ray_serve.names and not ray_serve.running
