"""Batching and a killed replica on Ray Serve."""

import os
import signal
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from websockets.sync.client import connect

from tests.serving.servers import make_export, make_service, served
from tests.serving.test_openpi import expected, message
from vla_finetuning.rollouts.player import PolicySource
from vla_finetuning.serving.openpi import pack, unpack

pytestmark = [pytest.mark.ray, pytest.mark.gate]
CLIENTS = 8


class Client:
    def __init__(self, addresses, session):
        self._socket = connect(f"ws://127.0.0.1:{addresses.port}/?session={session}", compression=None)
        self._socket.recv()

    def infer(self, sent):
        self._socket.send(pack(sent))
        answer = self._socket.recv()
        return answer if isinstance(answer, str) else unpack(answer)


@dataclass(frozen=True)
class Stopping(PolicySource):
    """A policy that writes its process id and blocks on the instruction "stop"."""

    note: Path = Path()

    def load(self, threads, other=None):
        player = super().load(threads, other)

        def play(observation, instructions, keys):
            if "stop" in instructions:
                (self.note.with_suffix(".part")).write_text(str(os.getpid()))
                self.note.with_suffix(".part").rename(self.note)
                threading.Event().wait()
            return player(observation, instructions, keys)

        return play


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    # Two of the cluster's three CPUs; the wait is long enough for a busy machine.
    folder = tmp_path_factory.mktemp("serving")
    plain = make_service(
        make_export(folder), "--serve.replicas=2", f"--serve.batch_size={CLIENTS}", "--serve.wait_ms=500"
    )
    return replace(plain, sources={"": Stopping(**vars(plain.sources[""]), note=folder / "note")})


@pytest.fixture(scope="module")
def addresses(service, ray_cluster):
    with served(service) as addresses:
        yield addresses


def test_concurrent_requests_are_batched_with_equal_results(service, addresses):
    clients = [Client(addresses, f"together {i}".replace(" ", "-")) for i in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as threads:
        answers = list(threads.map(lambda i: clients[i].infer(message(i % 6)), range(CLIENTS)))
    assert sum(answer["batch_rows"] for answer in answers) > CLIENTS  # some shared a batch
    for i, answer in enumerate(answers):
        alone = expected(service, f"together-{i}", 0, i % 6)
        np.testing.assert_allclose(answer["actions"], alone, atol=2e-6 * np.abs(alone).max())  # rounding of batches


@pytest.mark.faults
def test_dead_replica_fails_only_requests_in_flight(service, addresses):
    killed, note = threading.Event(), service.sources[""].note

    def run(i):
        """Request until two decisions began after the replica died."""
        client, answers, since = Client(addresses, f"others-{i}"), [], 0
        while since < 2:
            after = killed.is_set()
            answers.append(client.infer(message(i % 6)))
            since += after
        return answers

    stopped = Client(addresses, "stopped")
    with ThreadPoolExecutor(CLIENTS) as threads:
        in_flight = threads.submit(stopped.infer, message(prompt="stop"))
        while not note.exists():
            assert not in_flight.done(), in_flight.result()
            time.sleep(0.05)
        active = [threads.submit(run, i) for i in range(CLIENTS - 1)]
        os.kill(int(note.read_text()), signal.SIGKILL)
        assert "has died (ActorDiedError); send the observation again" in in_flight.result()
        killed.set()
        results = [future.result() for future in active]
    for i, answers in enumerate(results):
        assert [answer for answer in answers if isinstance(answer, str)] == []
        last = len(answers) - 1
        alone = expected(service, f"others-{i}", last, i % 6)
        np.testing.assert_allclose(answers[last]["actions"], alone, atol=2e-6 * np.abs(alone).max())
    # The failed decision was not counted.
    np.testing.assert_array_equal(stopped.infer(message())["actions"], expected(service, "stopped", 0))
    assert urllib.request.urlopen(f"http://127.0.0.1:{addresses.port}/healthz").read() == b"OK\n"
