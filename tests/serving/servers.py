"""Servers in this process, in a thread of their own, with or without Ray."""

import asyncio
import contextlib
import json
import shutil
import threading

from vla_finetuning.envs.two_bins_scene import CAMERAS, INSTRUCTIONS
from vla_finetuning.options.command_line import parse_serve
from vla_finetuning.rollouts.servers import load_players
from vla_finetuning.serving.gateway import Gateway
from vla_finetuning.serving.replicas import Batches, compute
from vla_finetuning.serving.server import listening, resolve_service, running

PORTS = ["--serve.port=0", "--serve.grpc_port=0", "--use_gpu=false"]


def make_export(folder, *robots):
    """Export a tiny PI0.5 for the two bins, of one robot or several."""
    from tests.rollouts.test_player import make_base

    tasks = [f"{opening}{text}" for opening in ("", *(f"{r}: " for r in robots)) for text in INSTRUCTIONS.values()]
    base = make_base(folder / "base", tasks)
    facts = {"fps": 10.0, "cameras": {f"observation.images.{name}": {} for name in CAMERAS}}
    facts |= dict.fromkeys(("observation.state", "action"), ["x", "y", "z"])
    if not robots:
        (base / "robot.json").write_text(json.dumps(facts))
        return base
    for robot in robots:
        shutil.copytree(base, folder / "both" / robot)
        opening = {"robot": robot, "instructions_begin_with": f"{robot}: "}
        (folder / "both" / robot / "robot.json").write_text(json.dumps({**facts, **opening}))
    return folder / "both"


def make_service(folder, *flags):
    return resolve_service(parse_serve([f"--policy.path={folder}", *PORTS, *flags]))


class InProcess:
    """Computes in this process, in place of Serve's handle."""

    def __init__(self, service):
        self._players = load_players(service.sources, 1)
        self.predict, self.requests = self, []

    async def remote(self, requests):
        self.requests += requests
        return compute(self._players, requests)


def gateway_of(service, handle, token=None):
    return Gateway(service.interfaces, Batches(handle, 1, 32, 0.005, 60), service.config.seed, token)


@contextlib.contextmanager
def served(service, handle=None, token=None):
    """Run a server, on Ray unless a handle is passed; yield its addresses."""

    async def healthy():
        return True

    def server():
        if handle is None:
            return running(service)
        return listening(gateway_of(service, handle, token), service.config.serve, healthy)

    async def serve():
        async with server() as addresses:
            started.append((addresses, asyncio.get_running_loop(), stop := asyncio.Event()))
            ready.set()
            await stop.wait()

    def run():
        try:
            asyncio.run(serve())
        except BaseException as error:
            failed.append(error)
            ready.set()

    started, failed, ready = [], [], threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    if failed:
        raise failed[0]
    ((addresses, loop, stop),) = started
    try:
        yield addresses
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
