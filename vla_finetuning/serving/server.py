"""`serve.py` in parts: find and check the policies, start the replicas, listen until the process is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray import serve
from ray.serve.config import ProxyLocation
from ray.serve.schema import ReplicaState

from vla_finetuning.buckets.mirror import as_path
from vla_finetuning.environment import Timeouts
from vla_finetuning.options.programs import ServeConfig
from vla_finetuning.options.serve import ServeOptions, read_token
from vla_finetuning.plan.base_policy import resolve_policy
from vla_finetuning.rollouts.player import PolicySource, check_acts, check_advantage, check_writes, opening_of
from vla_finetuning.run import cluster
from vla_finetuning.run.exported import exported_robots
from vla_finetuning.serving import lerobot, openpi
from vla_finetuning.serving.gateway import Gateway
from vla_finetuning.serving.observations import Interface
from vla_finetuning.serving.replicas import Batches, Replica
from vla_finetuning.terminal import print_safe


@dataclass(frozen=True)
class Service:
    """What is served, resolved and checked.

    Attributes:
        interfaces, sources: what each policy sees, and where a replica gets it from, by robot; "" of the only one.
    """

    config: ServeConfig
    interfaces: Mapping[str, Interface]
    sources: Mapping[str, PolicySource]


@dataclass(frozen=True)
class Addresses:
    """Where a server listens; `grpc`: None where LeRobot's protocol is not served."""

    host: str
    port: int
    grpc: int | None


def resolve_service(config: ServeConfig) -> Service:
    """Find and check the policies of a folder or of the Hub.

    Raises:
        ValueError, OSError: saying what to do.
    """
    for port in filter(None, (config.serve.port, config.serve.grpc_port)):
        socket.create_server((config.serve.host, port)).close()  # a port that is taken is told before weights are read
    path = config.policy_path or ""
    use_gpu = cluster.find_gpus("--use_gpu") > 0 if config.use_gpu is None else config.use_gpu
    interfaces, sources = {}, {}
    for robot in exported_robots(as_path(path)) or [""]:
        policy, folder, _ = resolve_policy(config, f"{path}/{robot}" if robot else path)
        assert folder is not None  # there was a path
        check_acts(policy)
        check_advantage(policy, config.advantage, config.guidance)
        check_writes(folder, policy, config.subtask)
        interfaces[robot] = Interface.of_export(robot, folder, policy, config.rename_map)
        if not any(option.startswith("--n_action_steps=") for option in config.policy_options):
            vars(policy)["n_action_steps"] = interfaces[robot].chunk_size  # how many are executed is for clients to say
        sources[robot] = PolicySource(
            folder,
            policy,
            env=None,
            device="cuda" if use_gpu else "cpu",
            trusted=config.policy_trust_remote_code,
            opening=opening_of(folder),
            advantage=config.advantage,
            guidance=config.guidance,
            subtask=config.subtask,
        )
    return Service(config, interfaces, sources)


@asynccontextmanager
async def running(service: Service) -> AsyncIterator[Addresses]:
    """Start the replicas on the cluster that this process has joined, and listen.

    Raises:
        OSError: a port is taken.
        RuntimeError: the replicas do not start.
    """
    config, options = service.config, service.config.serve
    name = f"policy-{options.port}"
    shared = not cluster.is_local()
    sources = {robot: source.shared() if shared else source for robot, source in service.sources.items()}
    on_gpu = any(source.device == "cuda" for source in sources.values())
    replica: Any = Replica  # `serve.deployment` has made it one
    deployment = replica.options(
        num_replicas=options.replicas,
        ray_actor_options={"num_cpus": options.cpus_per_replica, "num_gpus": int(on_gpu)},
        max_ongoing_requests=1,
    )
    application = deployment.bind(sources, options.cpus_per_replica)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    # Clients connect to this process, which alone knows the token: Serve's own ports stay closed.
    await asyncio.to_thread(serve.start, proxy_location=ProxyLocation.Disabled)
    handle = await asyncio.to_thread(partial(serve.run, application, name=name, route_prefix=None))
    timeout_s = Timeouts.from_environment().worker
    batches = Batches(handle, options.replicas, options.batch_size, options.wait_ms / 1000, timeout_s)
    gateway = Gateway(service.interfaces, batches, config.seed, read_token())

    try:
        async with listening(gateway, options, partial(asyncio.to_thread, runs, name)) as addresses:
            yield addresses
    finally:
        await asyncio.to_thread(serve.delete, name)


@asynccontextmanager
async def listening(
    gateway: Gateway, options: ServeOptions, is_healthy: Callable[[], Awaitable[bool]]
) -> AsyncIterator[Addresses]:
    """Speak both protocols. Raises OSError if a port is taken."""
    max_bytes, grpc_port = int(options.max_message_mb * 1e6), None
    async with AsyncExitStack() as stack:
        websockets = openpi.listening(gateway, options.host, options.port, max_bytes, is_healthy)
        port = await stack.enter_async_context(websockets)
        if options.grpc_port is not None:
            robots = lerobot.listening(gateway, options.host, options.grpc_port, max_bytes)
            grpc_port = await stack.enter_async_context(robots)
        yield Addresses(options.host, port, grpc_port)


def runs(name: str) -> bool:
    """Return whether a replica of an application runs."""
    application = serve.status().applications.get(name)
    deployments = application.deployments.values() if application else []
    return any(deployment.replica_states.get(ReplicaState.RUNNING) for deployment in deployments)


async def serve_until_stopped(service: Service) -> None:
    """Serve until SIGINT or SIGTERM. Raises as `running`."""
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with running(service) as addresses:
        print_safe(
            *(f"openpi       ws://{addresses.host}:{addresses.port}/{robot}" for robot in service.interfaces),
            *([f"LeRobot      {addresses.host}:{addresses.grpc} (gRPC)"] if addresses.grpc else []),
            f"Health       http://{addresses.host}:{addresses.port}/healthz, and /metrics",
        )
        await stopped.wait()


def describe_service(service: Service) -> list[str]:
    """Return the plan's lines: what is served, and what each robot sends."""
    lines = []
    for robot, interface in service.interfaces.items():
        inputs = [*interface.cameras, *(f"{name} ({width})" for name, width in interface.vectors.items())]
        lines.append(
            f"{f'Robot {robot}' if robot else 'Policy':12} {interface.policy_type}: {', '.join(inputs)} to "
            f"{interface.chunk_size} actions of {interface.action_width}"
        )
    options = service.config.serve
    device = "a GPU" if any(source.device == "cuda" for source in service.sources.values()) else "CPUs"
    lines.append(f"Replicas     {options.replicas} on {device}; batches of at most {options.batch_size}")
    return lines
