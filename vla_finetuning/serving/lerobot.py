"""LeRobot's asynchronous inference over gRPC: its `robot_client` connects unchanged.

Unlike LeRobot's server, it passes images on as the cameras took them (LeRobot's stretches them to the shapes of
config.json), serves many robots at once, runs no pickles, and answers errors with a message.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import grpc
import numpy as np
import torch
from lerobot.async_inference.helpers import TimedAction
from lerobot.transport import services_pb2, services_pb2_grpc
from lerobot.utils.constants import OBS_IMAGES, OBS_STATE

from vla_finetuning.envs.protocol import Observation
from vla_finetuning.serving.gateway import AuthenticationError, Gateway, Session
from vla_finetuning.serving.pickles import read_pickle

# As LeRobot's server: seconds that a client waits for actions, actions per second if the export has no fps, and bytes
# of a piece of an observation.
POLL_S, FPS, PIECE_BYTES = 2.0, 30.0, 4 * 2**20
# Number of clients that are remembered; the protocol does not tell when a client is gone.
MOST_CLIENTS = 1000
TOKEN_REMEDY = "--pretrained_name_or_path='ROBOT?token=SECRET'"


@dataclass(frozen=True)
class _TimedObservation:
    """An observation with the robot's step and time; `must_go`: the robot has no actions left and waits."""

    step: int
    timestamp: float
    must_go: bool
    observation: Observation
    instruction: str


@dataclass
class _Client:
    """A connected robot.

    Attributes:
        joints: the robot's names of joints, in the order of the policy's state.
        actions: number of actions per chunk that the robot requests.
        newest: the latest observation that has no actions yet.
        answered: steps that have actions.
    """

    session: Session
    joints: list[str]
    cameras: list[str]
    actions: int
    newest: asyncio.Queue[_TimedObservation] = field(default_factory=lambda: asyncio.Queue(1))
    answered: set[int] = field(default_factory=set)

    @classmethod
    def of_setup(cls, session: Session, setup: Mapping[str, Any]) -> _Client:
        """Build a client from the robot's setup message. Raises ValueError if it does not fit the policy."""
        interface = session.interface
        if (policy_type := setup.get("policy_type")) != interface.policy_type:
            raise ValueError(f"--policy_type={policy_type}: this server has a policy of type {interface.policy_type}")
        features, actions = setup.get("lerobot_features"), setup.get("actions_per_chunk")
        if type(actions) is not int or actions < 1 or not isinstance(features, dict):
            raise ValueError("the message names no features of the robot, or no number of --actions_per_chunk")
        state, prefix = features.get(OBS_STATE, {"names": []}), f"{OBS_IMAGES}."
        joints = state.get("names") if isinstance(state, dict) else None
        if not isinstance(joints, list) or not all(isinstance(joint, str) for joint in joints):
            raise ValueError(f"{OBS_STATE} of the robot has no names")
        cameras = [str(key).removeprefix(prefix) for key in features if str(key).startswith(prefix)]
        trained = interface.facts.get(OBS_STATE)
        if isinstance(trained, list) and sorted(map(str, trained)) == sorted(joints) and trained != joints:
            raise ValueError(f"{OBS_STATE}: the robot sends {', '.join(joints)}, the policy was trained with {trained}")
        client = cls(session, joints, cameras, actions)
        client.read({**dict.fromkeys(joints, 0.0), **dict.fromkeys(cameras, np.zeros((8, 8, 3), np.uint8)), "task": ""})
        return client

    def read(self, raw: Mapping[str, Any]) -> tuple[Observation, str]:
        """Read an observation under the robot's own names, as `Interface.read`."""
        if missing := [name for name in (*self.joints, *self.cameras) if name not in raw]:
            raise ValueError(f"the observation lacks {', '.join(missing)}, which the robot announced when it connected")
        if wrong := [joint for joint in self.joints if not isinstance(raw[joint], (int, float, np.number))]:
            raise ValueError(f"the observation's {', '.join(wrong)} are no numbers")
        message = {f"{OBS_IMAGES}.{name}": raw[name] for name in self.cameras} | {"task": raw.get("task", "")}
        if self.joints:
            message[OBS_STATE] = [raw[joint] for joint in self.joints]
        return self.session.interface.read(message)


class Servicer(services_pb2_grpc.AsyncInferenceServicer):
    """Answer LeRobot's `robot_client`; a client is a connection. `max_bytes` limits an observation."""

    def __init__(self, gateway: Gateway, max_bytes: int) -> None:
        self._gateway, self._max_bytes = gateway, max_bytes
        self._clients: dict[str, _Client] = {}  # least recently used first
        gateway.sessions.labels("lerobot").set_function(lambda: len(self._clients))

    async def Ready(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Forget what the client did before."""
        self._clients.pop(context.peer(), None)
        return services_pb2.Empty()

    async def SendPolicyInstructions(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Begin a session with the robot that `pretrained_name_or_path` names, as `ROBOT?session=NAME&token=SECRET`."""
        async with _reporting_errors(context):
            setup = read_pickle(request.data, "RemotePolicyConfig")
            address = str(setup.get("pretrained_name_or_path", ""))
            self._gateway.check_token(parse_qs(urlsplit(address).query).get("token", [""])[0], TOKEN_REMEDY)
            client = _Client.of_setup(self._gateway.open(address), setup)
            while len(self._clients) >= MOST_CLIENTS:
                del self._clients[next(iter(self._clients))]
            self._clients[context.peer()] = client
        return services_pb2.Empty()

    async def SendObservations(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        """Store an observation; it replaces an older one."""
        async with _reporting_errors(context):
            client, data = self._client(context), bytearray()
            with self._gateway.reading(client.session):
                async for piece in request_iterator:
                    data += piece.data
                    if len(data) > self._max_bytes:
                        limit = f"{self._max_bytes:,} bytes, --serve.max_message_mb of the server"
                        raise ValueError(f"an observation has more than {limit}")
                sent = read_pickle(bytes(data), "TimedObservation")
                step, timestamp, raw = sent.get("timestep"), sent.get("timestamp"), sent.get("observation")
                if type(step) is not int or step < 0:
                    raise ValueError(f"an observation has the timestep {step!r}: expected a whole number, at least 0")
                if not isinstance(timestamp, (int, float)):
                    raise ValueError(f"an observation has the timestamp {timestamp!r:.100}: expected seconds")
                if not isinstance(raw, dict):
                    raise ValueError(f"an observation is {type(raw).__name__}: expected values by name")
                timed = _TimedObservation(step, timestamp, bool(sent.get("must_go")), *client.read(raw))
            if timed.must_go or step not in client.answered:
                if client.newest.full():
                    client.newest.get_nowait()
                client.newest.put_nowait(timed)
        return services_pb2.Empty()

    async def GetActions(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Return the actions for the latest observation, or none if no observation arrives within POLL_S."""
        async with _reporting_errors(context):
            client = self._client(context)
            try:
                timed = await asyncio.wait_for(client.newest.get(), POLL_S)
            except TimeoutError:
                return services_pb2.Actions()
            if timed.step in client.answered and not timed.must_go:  # it arrived while its actions were computed
                return services_pb2.Actions()
            answer = await self._gateway.decide(client.session, timed.observation, timed.instruction, timed.step)
            client.answered.add(timed.step)
            frame_s = 1 / float(client.session.interface.facts.get("fps", FPS))
            actions = [
                TimedAction(timed.timestamp + i * frame_s, timed.step + i, torch.tensor(action))
                for i, action in enumerate(answer.actions[: client.actions])
            ]
            return services_pb2.Actions(data=pickle.dumps(actions))

    def _client(self, context: Any) -> _Client:
        if (client := self._clients.pop(context.peer(), None)) is None:
            raise ValueError("this connection has no session: start robot_client anew, which says what robot it is")
        self._clients[context.peer()] = client
        return client


@asynccontextmanager
async def _reporting_errors(context: Any) -> AsyncIterator[None]:
    """Turn errors in the block into a status and a message, which the client logs."""
    try:
        yield
    except AuthenticationError as error:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
    except ValueError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except RuntimeError as error:
        await context.abort(grpc.StatusCode.INTERNAL, str(error))


@asynccontextmanager
async def listening(gateway: Gateway, host: str, port: int, max_bytes: int) -> AsyncIterator[int]:
    """Listen, and yield the port. Raises OSError if it is taken."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", PIECE_BYTES), ("grpc.so_reuseport", 0)])
    services_pb2_grpc.add_AsyncInferenceServicer_to_server(Servicer(gateway, max_bytes), server)
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise OSError(f"--serve.grpc_port={port}: {error}") from error
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(grace=None)
