"""On Ray Serve: batches of what arrives together, and a replica that dies."""

import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import ray
from websockets.sync.client import connect

from tests.serving.servers import make_export, make_service, served
from tests.serving.test_openpi import expected, message
from vla_finetuning.serving.openpi import pack, unpack

pytestmark = pytest.mark.ray
CLIENTS = 8


class Client:
    def __init__(self, addresses, session):
        self._socket = connect(f"ws://127.0.0.1:{addresses.port}/?session={session}", compression=None)
        self._socket.recv()

    def infer(self, sent):
        self._socket.send(pack(sent))
        answer = self._socket.recv()
        return answer if isinstance(answer, str) else unpack(answer)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    # Two of the cluster's three CPUs; a wait that outlasts the threads of a busy machine.
    folder = make_export(tmp_path_factory.mktemp("serving"))
    return make_service(folder, "--serve.replicas=2", f"--serve.batch_size={CLIENTS}", "--serve.wait_ms=500")


@pytest.fixture(scope="module")
def addresses(service, ray_cluster):
    with served(service) as addresses:
        yield addresses


def test_what_arrives_together_is_computed_together_and_is_the_same(service, addresses):
    clients = [Client(addresses, f"together {i}".replace(" ", "-")) for i in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as threads:
        answers = list(threads.map(lambda i: clients[i].infer(message(i % 6)), range(CLIENTS)))
    assert sum(answer["batch_rows"] for answer in answers) > CLIENTS  # some shared a batch
    for i, answer in enumerate(answers):
        alone = expected(service, f"together-{i}", 0, i % 6)
        np.testing.assert_allclose(answer["actions"], alone, atol=2e-6 * np.abs(alone).max())  # rounding of batches


@pytest.mark.faults
def test_a_replica_that_dies_costs_the_requests_in_flight_and_no_other(service, addresses):
    killed, ends = threading.Event(), time.monotonic() + 120

    def run(i):
        """Answers by decision, what failed, and decisions that began after the replica was gone."""
        client, answers, failures, since = Client(addresses, f"killed-{i}"), [], [], 0
        while since < 2 and time.monotonic() < ends:
            after = killed.is_set()
            answer = client.infer(message(i % 6))
            if isinstance(answer, str):
                failures.append(answer)
            else:
                answers.append(answer["actions"])
                since += after
        return answers, failures, since

    def replicas():
        return [actor for actor in ray.util.list_named_actors(all_namespaces=True) if "#Replica#" in actor["name"]]

    with ThreadPoolExecutor(CLIENTS) as threads:
        running = [threads.submit(run, i) for i in range(CLIENTS)]
        time.sleep(1)
        first, second = replicas()
        ray.kill(ray.get_actor(**first))
        killed.set()
        results = [future.result() for future in running]
    failures = [failure for _, failed, _ in results for failure in failed]
    assert all(len(failed) <= 1 and since == 2 for _, failed, since in results)
    # None where the replica was between two batches.
    assert len(failures) < CLIENTS and all("is gone" in failure for failure in failures)
    for i, (answers, _, _) in enumerate(results):  # the decision that failed was not counted
        last = len(answers) - 1
        alone = expected(service, f"killed-{i}", last, i % 6)
        np.testing.assert_allclose(answers[last], alone, atol=2e-6 * np.abs(alone).max())
    assert urllib.request.urlopen(f"http://127.0.0.1:{addresses.port}/healthz").read() == b"OK\n"
