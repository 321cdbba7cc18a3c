"""What a server costs beside the same policy called in process, and what batches of several clients gain.

    python -m benchmarks.serving --policy outputs/demo/pretrained_model [--rounds 5] [--seconds 10] [--json FILE]

Clients of openpi's protocol send an observation when they have the actions for the last one, without a pause. Servers,
numbers of clients and the policy in process take turns, `--rounds` times, so that they share what else the machine
does. Latencies are of all rounds; rates are medians of rounds; a row of the result also has the mean size of batches.

    in process       the policy called for one observation after the other, and for 8 and 32 at once
    server           `serve.py` with 1, 8 and 32 clients
    one at a time    `serve.py --serve.batch_size 1` with 32 clients
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from websockets.asyncio.client import connect

from vla_finetuning.files import write_json
from vla_finetuning.terminal import print_safe

CLIENTS = (1, 8, 32)
START_S = 300.0


Answers = list[tuple[float, int]]  # seconds that each took, and rows of its batch


def ask(port: int, clients: int, seconds: float, message: bytes) -> Answers:
    """Return all answers that so many clients got. Runs in a process of its own."""

    async def client() -> Answers:
        answers = []
        async with connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None) as connection:
            await connection.recv()
            ends = time.perf_counter() + seconds
            while (began := time.perf_counter()) < ends:
                await connection.send(message)
                if isinstance(answer := await connection.recv(), str):
                    raise RuntimeError(answer)
                took = time.perf_counter() - began
                answers.append((took, msgpack.unpackb(answer)["batch_rows"]))
        return answers

    async def together() -> Answers:
        return sum(await asyncio.gather(*(client() for _ in range(clients))), [])

    return asyncio.run(together())


@contextmanager
def server(folder: Path, port: int, batch_size: int) -> Iterator[None]:
    """Start `serve.py`, on a Ray of its own."""
    flags = [f"--policy.path={folder}", f"--serve.port={port}", "--serve.grpc_port=null", "--use_gpu=false"]
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as ray_dir, tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "serve.py", *flags, f"--serve.batch_size={batch_size}"]
        # At Ray's own niceness, 15, the replica would have what the policy in process leaves of a busy machine.
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
    except (urllib.error.URLError, OSError):
        return False


def measure(folder: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Return latencies in ms and rates, by what answered."""
    # Here: the process that asks imports none of it.
    from vla_finetuning.options.command_line import parse_serve
    from vla_finetuning.rollouts.scheduler import concatenate
    from vla_finetuning.serving.openpi import pack
    from vla_finetuning.serving.server import resolve_service

    service = resolve_service(parse_serve([f"--policy.path={folder}", "--serve.port=0", "--serve.grpc_port=0"]))
    ((robot, interface),) = service.interfaces.items()
    cameras = interface.facts.get("cameras", {})
    sizes = {name: (cameras.get(name, {}).get("height", 224), cameras.get(name, {}).get("width", 224), 3)
             for name in interface.cameras}  # fmt: skip
    rng = np.random.default_rng(0)
    message: dict[str, Any] = {name: rng.integers(0, 256, size, dtype=np.uint8) for name, size in sizes.items()}
    message |= {name: np.zeros(width, np.float32) for name, width in interface.vectors.items()}
    message["prompt"] = next(iter(interface.facts.get("instructions", [])), "go")
    observation, instruction = interface.read(message)
    player = service.sources[robot].load(1)

    def in_process(rows: int) -> Answers:
        answers: Answers = []
        ends, many = time.perf_counter() + seconds, concatenate([observation] * rows)
        while (began := time.perf_counter()) < ends:
            player(many, [instruction] * rows, [(0, "session", 0, row) for row in range(rows)])
            answers += [(time.perf_counter() - began, rows)] * rows
        return answers

    answers: dict[str, Answers] = defaultdict(list)
    rates: dict[str, list[float]] = defaultdict(list)
    port = 18000
    with ExitStack() as stack:
        for number, batch_size in ((port, 32), (port + 1, 1)):
            stack.enter_context(server(folder, number, batch_size))
        pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(1))
        for asked in (port, port + 1):  # what is imported and allocated by the first
            pool.apply(ask, (asked, 32, 3.0, pack(message)))
        in_process(1)
        for _ in range(rounds):
            turns: list[tuple[str, Any]] = [(f"in process, {n} at once", lambda n=n: in_process(n)) for n in CLIENTS]
            turns += [
                (f"server, {n} clients", lambda n=n: pool.apply(ask, (port, n, seconds, pack(message))))
                for n in CLIENTS
            ]
            turns.append(("one at a time, 32 clients", lambda: pool.apply(ask, (port + 1, 32, seconds, pack(message)))))
            for name, turn in turns:
                began = time.perf_counter()
                found = turn()
                answers[name] += found
                rates[name].append(len(found) / (time.perf_counter() - began))
                seconds_of, rows = np.array(found).T
                print_safe(
                    f"{name:26} {rates[name][-1]:7.1f} a second, median {1000 * np.median(seconds_of):6.1f} ms, "
                    f"in batches of {rows.mean():.1f}"
                )
    return {
        name: {
            "rate": float(np.median(rates[name])),
            **{f"p{q}_ms": float(1000 * np.percentile([took for took, _ in found], q)) for q in (50, 95, 99)},
            "batch_rows": float(np.mean([rows for _, rows in found])),
            "answers": len(found),
        }
        for name, found in answers.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--policy", type=Path, default=Path("outputs/demo/pretrained_model"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    found = measure(options.policy, options.rounds, options.seconds)
    from diagnostics.report import Environment

    result = {
        "command": shlex.join(["python", "-m", "benchmarks.serving", *sys.argv[1:]]),
        "environment": Environment.here().model_dump(),
        "load_before": load,
        "results": found,
        "together_against_one_at_a_time": found["server, 32 clients"]["rate"]
        / found["one at a time, 32 clients"]["rate"],
        "server_against_in_process_ms": found["server, 1 clients"]["p50_ms"] - found["in process, 1 at once"]["p50_ms"],
    }
    if options.json:
        write_json(options.json, result)
    print_safe(f"together against one at a time: {result['together_against_one_at_a_time']:.2f} times the rate")


if __name__ == "__main__":
    main()
