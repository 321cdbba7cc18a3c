"""Measure the latency of a server beside the same policy in process, and the gain of batches from several clients.

    python -m benchmarks.serving --policy outputs/demo/pretrained_model [--rounds 5] [--seconds 10] [--json FILE]

Clients of openpi's and of LeRobot's protocol send the next observation when they have received actions. Servers,
numbers of clients and the policy in process alternate for `--rounds` rounds after a warm-up round. Latencies are over
all rounds, rates are medians of rounds.

    in process                the policy, called with 1, 8 and 32 observations
    openpi, LeRobot           `serve.py` with 1, 8 and 32 clients of a protocol
    one at a time             `serve.py --serve.batch_size 1` with 32 clients of openpi's protocol
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from websockets.asyncio.client import connect

from vla_finetuning.files import write_json
from vla_finetuning.terminal import print_safe

CLIENTS = (1, 8, 32)
START_S = 300.0
ON_CPU = "--use_gpu=false"  # of the servers and of the policy in process
PORT, ALONE_PORT = 18000, 18100  # openpi's, with and without batches; LeRobot's is the next port
Exchange = Callable[[], Awaitable[Any]]


async def connect_openpi(stack: AsyncExitStack, port: int, message: bytes) -> Exchange:
    """Connect a client of openpi's protocol; return a function that sends the message and awaits actions."""
    connection = await stack.enter_async_context(
        connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None, open_timeout=None)
    )
    await connection.recv()

    async def exchange() -> None:
        await connection.send(message)
        if isinstance(answer := await connection.recv(), str):
            raise RuntimeError(answer)

    return exchange


async def connect_lerobot(stack: AsyncExitStack, port: int, setup: bytes, message: bytes) -> Exchange:
    """Connect a client of LeRobot's protocol, as `connect_openpi`; `setup` describes its robot."""
    # Imported late, so that clients of openpi's protocol import no torch.
    from lerobot.transport import services_pb2 as messages
    from lerobot.transport.services_pb2_grpc import AsyncInferenceStub
    from lerobot.transport.utils import send_bytes_in_chunks

    # Clients of one process would share a connection by default.
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port + 1}", [("grpc.use_local_subchannel_pool", 1)])
    stub: Any = AsyncInferenceStub(await stack.enter_async_context(channel))
    await stub.SendPolicyInstructions(messages.PolicySetup(data=setup))

    async def exchange() -> None:
        await stub.SendObservations(send_bytes_in_chunks(message, messages.Observation, silent=True))
        if not (await stub.GetActions(messages.Empty())).data:
            raise RuntimeError("no actions came within the server's time")

    return exchange


def query(connect: Callable[..., Awaitable[Exchange]], clients: int, seconds: float, *arguments: Any) -> list[float]:
    """Return the seconds of each answer to `clients` concurrent clients. Runs in a separate process."""

    async def client() -> list[float]:
        async with AsyncExitStack() as stack:
            exchange, answers = await connect(stack, *arguments), []
            ends = time.perf_counter() + seconds
            while (began := time.perf_counter()) < ends:
                await exchange()
                answers.append(time.perf_counter() - began)
        return answers

    async def together() -> list[float]:
        return sum(await asyncio.gather(*(client() for _ in range(clients))), [])

    return asyncio.run(together())


@contextmanager
def server(folder: Path, port: int, batch_size: int) -> Iterator[None]:
    """Run `serve.py` with its own Ray cluster in the block."""
    flags = [f"--policy.path={folder}", f"--serve.port={port}", f"--serve.grpc_port={port + 1}", ON_CPU]
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as ray_dir, tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "serve.py", *flags, f"--serve.batch_size={batch_size}"]
        # Ray's default niceness of 15 would slow the replica down beside the policy in process.
        environment = {**os.environ, "RAY_TMPDIR": ray_dir, "RAY_worker_niceness": "0"}
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            ends = time.monotonic() + START_S
            while not _is_healthy(port):
                if process.poll() is not None or time.monotonic() > ends:
                    log.seek(0)
                    raise RuntimeError(f"serve.py does not answer: {log.read()[-2000:]}")
                time.sleep(0.5)
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def _is_healthy(port: int) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5).status == 200
    except OSError:
        return False


def make_messages(interface: Any) -> tuple[dict[str, Any], bytes, bytes]:
    """Return a random observation for a policy, and LeRobot's messages with the robot and the same observation."""
    from lerobot.async_inference.helpers import RemotePolicyConfig, TimedObservation
    from lerobot.utils.constants import OBS_IMAGES, OBS_STATE

    facts, rng = interface.facts, np.random.default_rng(0)
    images = {}
    for name in interface.cameras:
        camera = facts.get("cameras", {}).get(name, {})
        images[name] = rng.integers(0, 256, (camera.get("height", 224), camera.get("width", 224), 3), np.uint8)
    joints = [str(joint) for joint in facts.get(OBS_STATE, range(interface.vectors[OBS_STATE]))]
    task = next(iter(facts.get("instructions", [])), "go")
    setup = RemotePolicyConfig(
        interface.policy_type, "any", {**dict.fromkeys(images, {}), OBS_STATE: {"names": joints}}, interface.chunk_size
    )
    raw = {name.removeprefix(f"{OBS_IMAGES}."): image for name, image in images.items()} | {"task": task}
    observation = TimedObservation(0.0, 0, {**raw, **dict.fromkeys(joints, 0.0)}, must_go=True)
    message = {**images, OBS_STATE: np.zeros(len(joints), np.float32), "prompt": task}
    return message, pickle.dumps(setup), pickle.dumps(observation)


def measure(folder: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Return latencies in ms and rates by contender."""
    # Imported late, so that the clients' process imports none of these.
    from vla_finetuning.options.command_line import parse_serve
    from vla_finetuning.rollouts.scheduler import concatenate
    from vla_finetuning.serving.openpi import pack
    from vla_finetuning.serving.server import resolve_service

    service = resolve_service(parse_serve([f"--policy.path={folder}", "--serve.port=0", "--serve.grpc_port=0", ON_CPU]))
    ((robot, interface),) = service.interfaces.items()
    message, *lerobots = make_messages(interface)
    openpis = pack(message)
    observation, instruction = interface.read(message)
    player = service.sources[robot].load(1)

    def in_process(rows: int) -> list[float]:
        answers: list[float] = []
        ends, many = time.perf_counter() + seconds, concatenate([observation] * rows)
        while (began := time.perf_counter()) < ends:
            player(many, [instruction] * rows, [(0, "session", 0, row) for row in range(rows)])
            answers += [time.perf_counter() - began] * rows
        return answers

    answers: dict[str, list[float]] = defaultdict(list)
    rates: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        for port, batch_size in ((PORT, 32), (ALONE_PORT, 1)):
            stack.enter_context(server(folder, port, batch_size))
        served = stack.enter_context(multiprocessing.get_context("spawn").Pool(1)).apply
        turns: dict[str, Callable[[], list[float]]] = {}
        for n in CLIENTS:
            turns[f"in process, {n} at once"] = partial(in_process, n)
            turns[f"openpi, {n} clients"] = partial(served, query, (connect_openpi, n, seconds, PORT, openpis))
            turns[f"LeRobot, {n} clients"] = partial(served, query, (connect_lerobot, n, seconds, PORT, *lerobots))
        turns["one at a time, 32 clients"] = partial(served, query, (connect_openpi, 32, seconds, ALONE_PORT, openpis))
        for number in range(rounds + 1):
            for name, turn in turns.items():
                began, latencies = time.perf_counter(), turn()
                if number == 0:
                    continue  # the warm-up imports and allocates
                answers[name] += latencies
                rates[name].append(len(latencies) / (time.perf_counter() - began))
                print_safe(f"{name:26} {rates[name][-1]:7.1f} a second, median {1000 * np.median(latencies):6.1f} ms")
    return {
        name: {
            "rate": float(np.median(rates[name])),
            **{f"p{q}_ms": float(1000 * np.percentile(latencies, q)) for q in (50, 95, 99)},
            "answers": len(latencies),
        }
        for name, latencies in answers.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--policy", type=Path, default=Path("outputs/demo/pretrained_model"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    results = measure(options.policy, options.rounds, options.seconds)
    from diagnostics.report import provenance

    together = results["openpi, 32 clients"]["rate"] / results["one at a time, 32 clients"]["rate"]
    inside = results["in process, 1 at once"]["p50_ms"]
    costs = {name: results[f"{name}, 1 clients"]["p50_ms"] - inside for name in ("openpi", "LeRobot")}
    result = {
        **provenance(rounds=options.rounds, seconds=options.seconds),
        "load_before": load,
        "results": results,
        "together_against_one_at_a_time": together,
        "server_against_in_process_ms": costs,
    }
    if options.json:
        write_json(options.json, result)
    print_safe(f"together against one at a time: {together:.2f} times the rate")


if __name__ == "__main__":
    main()
