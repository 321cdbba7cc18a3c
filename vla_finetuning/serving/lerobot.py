"""LeRobot's asynchronous inference over gRPC: its `robot_client` connects unchanged.

Of LeRobot's own server this differs in that images reach the policy as the cameras took them (LeRobot's stretches them
to the shapes of config.json before the policy fits them in), in that it serves many robots at once, runs no pickles,
and answers what is wrong instead of leaving it in its log.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn
from urllib.parse import parse_qs, urlsplit

import grpc
import numpy as np
import torch
from lerobot.async_inference.helpers import TimedAction
from lerobot.transport import services_pb2, services_pb2_grpc
from lerobot.utils.constants import OBS_IMAGES, OBS_STATE

from vla_finetuning.serving.gateway import AuthenticationError, Gateway, Session
from vla_finetuning.serving.observations import Interface
from vla_finetuning.serving.pickles import read_pickle

# As LeRobot's server: seconds that a client waits for actions before it asks again; actions per second where the policy
# does not say; bytes of a piece of an observation.
POLL_S, FPS, PIECE_BYTES = 2.0, 30.0, 4 * 2**20
# Clients that are remembered: one that has not been seen since so many others came is forgotten.
MOST_CLIENTS = 1000


class NoSessionError(ValueError):
    """A connection asks for actions, or sends an observation, that has not said what robot it is."""


@dataclass
class _Client:
    """A robot that has connected.

    Attributes:
        names: of the numbers that its observations hold, in the order of the policy's state. cameras: by the dataset's
            names, its own. actions: of a chunk that it wants.
        newest: its latest observation that no actions were computed for. decided: the steps that some were.
    """

    session: Session
    names: list[str]
    cameras: dict[str, str]
    actions: int
    newest: asyncio.Queue[dict[str, Any]] = field(default_factory=lambda: asyncio.Queue(1))
    decided: set[int] = field(default_factory=set)


class Servicer(services_pb2_grpc.AsyncInferenceServicer):
    """Answers LeRobot's `robot_client`: a client is a connection.

    Args:
        max_bytes: of an observation.
    """

    def __init__(self, gateway: Gateway, max_bytes: int) -> None:
        self._gateway, self._max_bytes = gateway, max_bytes
        self._clients: dict[str, _Client] = {}

    async def Ready(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Forget what the client did before."""
        self._clients.pop(context.peer(), None)
        return services_pb2.Empty()

    async def SendPolicyInstructions(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Begin a session with the robot that `pretrained_name_or_path` names, as `ROBOT?session=NAME&token=SECRET`."""
        async with _answered(context):
            remote_config = read_pickle(request.data, "RemotePolicyConfig")
            address = str(remote_config.get("pretrained_name_or_path", ""))
            self._gateway.check_token(next(iter(parse_qs(urlsplit(address).query).get("token", [])), None))
            client = _client(self._gateway.open(address), remote_config)
            while len(self._clients) >= MOST_CLIENTS:
                del self._clients[next(iter(self._clients))]
            self._clients[context.peer()] = client
            self._gateway.sessions.labels("lerobot").set(len(self._clients))
        return services_pb2.Empty()

    async def SendObservations(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        """Take an observation in place of an older one."""
        async with _answered(context):
            client, data = self._client(context), bytearray()
            async for piece in request_iterator:
                data += piece.data
                if len(data) > self._max_bytes:
                    raise ValueError(
                        f"an observation has more than {self._max_bytes:,} bytes, --serve.max_message_mb of the server"
                    )
            observation = read_pickle(bytes(data), "TimedObservation")
            step = observation.get("timestep")
            if type(step) is not int or step < 0:
                raise ValueError(f"an observation has the timestep {step!r}: expected a whole number, at least 0")
            raw = observation.get("observation")
            if not isinstance(raw, dict):
                raise ValueError(f"an observation is {type(raw).__name__}: expected values by name")
            message = _message(client, raw)
            client.session.interface.read(message)  # refused here, where the client is told
            if observation.get("must_go") or step not in client.decided:
                if client.newest.full():
                    client.newest.get_nowait()
                client.newest.put_nowait({**observation, "observation": message})
        return services_pb2.Empty()

    async def GetActions(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Return the actions for the latest observation; nothing where none has come for a while."""
        async with _answered(context):
            client = self._client(context)
            try:
                observation = await asyncio.wait_for(client.newest.get(), POLL_S)
            except TimeoutError:
                return services_pb2.Actions()
            step, began = observation["timestep"], float(observation.get("timestamp") or 0)
            answer = await self._gateway.decide(client.session, observation["observation"], step)
            client.decided.add(step)
            fps = float(client.session.interface.facts.get("fps", FPS))
            chunk = torch.from_numpy(np.array(answer.actions[: client.actions]))
            actions = [TimedAction(began + i / fps, step + i, action.clone()) for i, action in enumerate(chunk)]
            return services_pb2.Actions(data=pickle.dumps(actions))

    def _client(self, context: Any) -> _Client:
        client = self._clients.get(context.peer())
        if client is None:
            raise NoSessionError("this connection has no session: start robot_client anew, which says what robot it is")
        return client


@asynccontextmanager
async def _answered(context: Any) -> AsyncIterator[None]:
    """End the call with a status and a sentence that the client logs, where it goes wrong."""

    async def abort(code: grpc.StatusCode, error: Exception) -> NoReturn:
        await context.abort(code, str(error))
        raise AssertionError  # `abort` does not return

    try:
        yield
    except AuthenticationError as error:
        await abort(
            grpc.StatusCode.UNAUTHENTICATED, ValueError(f"{error}: --pretrained_name_or_path='ROBOT?token=SECRET'")
        )
    except NoSessionError as error:
        await abort(grpc.StatusCode.FAILED_PRECONDITION, error)
    except ValueError as error:
        await abort(grpc.StatusCode.INVALID_ARGUMENT, error)
    except RuntimeError as error:
        await abort(grpc.StatusCode.INTERNAL, error)


def _client(session: Session, remote_config: Mapping[str, Any]) -> _Client:
    """Return the client of a session, given what it says of its robot. Raises ValueError where the policy differs."""
    interface = session.interface
    if (policy_type := remote_config.get("policy_type")) != interface.policy_type:
        raise ValueError(f"--policy_type={policy_type}: this server has a policy of type {interface.policy_type}")
    features, actions = remote_config.get("lerobot_features"), remote_config.get("actions_per_chunk")
    if type(actions) is not int or actions < 1 or not isinstance(features, dict):
        raise ValueError("the message names no features of the robot, or no number of --actions_per_chunk")
    cameras = {key: key.removeprefix(f"{OBS_IMAGES}.") for key in features if str(key).startswith(f"{OBS_IMAGES}.")}
    state = features.get(OBS_STATE)
    names = state.get("names") if isinstance(state, dict) else []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{OBS_STATE} of the robot has no names")
    _check_robot(interface, names, cameras)
    return _Client(session, names, cameras, actions)


def _check_robot(interface: Interface, names: list[str], cameras: Mapping[str, str]) -> None:
    """Refuse a robot that the policy does not see as it was trained, before it moves."""
    trained = interface.facts.get(OBS_STATE)
    if isinstance(trained, list) and sorted(map(str, trained)) == sorted(names) and list(map(str, trained)) != names:
        raise ValueError(f"{OBS_STATE}: the robot sends {', '.join(names)}, the policy was trained with {trained}")
    blank = {key: np.zeros((8, 8, 3), np.uint8) for key in cameras}
    interface.read({**blank, OBS_STATE: np.zeros(len(names), np.float32), "task": ""})


def _message(client: _Client, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a robot sends by LeRobot's names for datasets. Raises ValueError for what it lacks."""
    expected = itertools.chain(client.names, client.cameras.values())
    if missing := [name for name in expected if name not in raw]:
        raise ValueError(f"the observation lacks {', '.join(missing)}, of which the robot spoke when it connected")
    numbers = [raw[name] for name in client.names]
    if wrong := [n for n, v in zip(client.names, numbers, strict=True) if not isinstance(v, (int, float, np.number))]:
        raise ValueError(f"the observation's {', '.join(wrong)} are no numbers")
    state = {OBS_STATE: np.array(numbers, np.float32)} if numbers else {}
    return {**{key: raw[name] for key, name in client.cameras.items()}, **state, "task": raw.get("task", "")}


async def listen(gateway: Gateway, host: str, port: int, max_bytes: int) -> tuple[grpc.aio.Server, int]:
    """Start to listen. Returns the server and its port. Raises OSError if the port is taken."""
    options = [("grpc.max_receive_message_length", PIECE_BYTES), ("grpc.so_reuseport", 0)]
    server = grpc.aio.server(options=options)
    services_pb2_grpc.add_AsyncInferenceServicer_to_server(Servicer(gateway, max_bytes), server)
    try:
        bound = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except RuntimeError as error:
        raise OSError(f"--serve.grpc_port={port}: {error}") from error
    await server.start()
    return server, bound
