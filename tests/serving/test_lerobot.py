"""The calls of LeRobot's robot_client, one by one; tests/robot/ runs the client itself."""

import asyncio
import os
import pickle
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
import torch
from lerobot.async_inference.helpers import RemotePolicyConfig, TimedObservation
from lerobot.transport import services_pb2, services_pb2_grpc
from lerobot.transport.utils import send_bytes_in_chunks
from lerobot.utils.feature_utils import hw_to_dataset_features

from tests.serving.servers import InProcess, make_service, served
from vla_finetuning.serving import lerobot
from vla_finetuning.serving.pickles import read_pickle

STATE = {"x": 1.0, "y": 2.0, "z": 3.0}
SIZES = {"top": (80, 120, 3), "front": (70, 70, 3), "wrist": (40, 40, 3)}  # not those in config.json
TASK = "go to the red bin"
TOKEN = "0123456789abcdef"


def camera_image(name):
    return np.random.default_rng(len(name)).integers(0, 256, SIZES[name], dtype=np.uint8)


def expected(service, session, step):
    """Predict the chunk in process, from the images in camera sizes."""
    observed = {
        "agent_pos": np.array([[1, 2, 3]], np.float32),
        "pixels": {name: camera_image(name)[None] for name in SIZES},
    }
    return service.sources[""].load(1)(observed, [TASK], [(service.config.seed, session, 0, step)])[0]


class Stub:
    def __init__(self, addresses, **setup):
        # Otherwise channels with equal options share a connection.
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(f"127.0.0.1:{addresses.grpc}", options)
        self.stub = services_pb2_grpc.AsyncInferenceStub(self.channel)
        self.setup = {"policy_type": "tiny_pi05", "pretrained_name_or_path": "x?session=stub",
                      "lerobot_features": features(), "actions_per_chunk": 5, **setup}  # fmt: skip

    def begin(self):
        self.stub.Ready(services_pb2.Empty())
        self.stub.SendPolicyInstructions(services_pb2.PolicySetup(data=pickle.dumps(RemotePolicyConfig(**self.setup))))
        return self

    def send(self, data):
        if not isinstance(data, bytes):
            data = pickle.dumps(data)
        self.stub.SendObservations(send_bytes_in_chunks(data, services_pb2.Observation))

    def receive(self):
        return pickle.loads(self.stub.GetActions(services_pb2.Empty()).data)


def observation(step=0, must_go=True, **changes):
    raw = {**STATE, **{name: camera_image(name) for name in SIZES}, "task": TASK, **changes}
    raw = {key: value for key, value in raw.items() if value is not None}
    return TimedObservation(timestamp=100.0, timestep=step, observation=raw, must_go=must_go)


def features(names=tuple(STATE), cameras=tuple(SIZES)):
    return hw_to_dataset_features(
        {**dict.fromkeys(names, float), **{name: (8, 8, 3) for name in cameras}}, "observation", use_video=False
    )


@pytest.mark.parametrize(
    ("setup", "error"),
    [
        ({"policy_type": "act"}, "--policy_type=act: this server has a policy of type tiny_pi05"),
        ({"lerobot_features": features(cameras=("top", "front"))}, "lacks observation.images.wrist"),
        ({"lerobot_features": features(cameras=(*SIZES, "side"))}, "no such camera, it sees observation.images.top"),
        ({"lerobot_features": features(names=("x", "y"))}, "has 2 entries, and the policy was trained with 3"),
        ({"lerobot_features": features(names=("z", "y", "x"))}, "sends z, y, x, the policy was trained with"),
        ({"actions_per_chunk": 0}, "no number of --actions_per_chunk"),
    ],
)
def test_mismatched_robot_is_refused_at_setup(addresses, setup, error):
    with pytest.raises(grpc.RpcError, match=error):
        Stub(addresses, **setup).begin()


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (observation(top=None), "lacks top, which the robot announced"),
        (observation(x="far"), "observation's x are no numbers"),
        (observation(x=10**400), "'observation.state' is object .3,.: send a vector of numbers"),
        (observation(step=-1), "timestep -1: expected a whole number"),
        (TimedObservation(timestamp="noon", timestep=0, observation={}), "timestamp 'noon': expected seconds"),
        (b"\x80\x04.", "no pickle of TimedObservation"),
    ],
)
def test_invalid_observation_is_refused_and_session_continues(service, addresses, sent, error):
    stub = Stub(addresses)
    with pytest.raises(grpc.RpcError, match="this connection has no session"):
        stub.send(observation())
    stub.begin()
    with pytest.raises(grpc.RpcError, match=error):
        stub.send(sent)
    stub.send(observation())
    actions = stub.receive()
    np.testing.assert_array_equal(
        torch.stack([action.get_action() for action in actions]), expected(service, "stub", 0)[:5]
    )
    assert [action.get_timestep() for action in actions] == [0, 1, 2, 3, 4]
    np.testing.assert_allclose([action.get_timestamp() for action in actions], 100 + np.arange(5) / 10)


def test_step_is_computed_once_unless_must_go(addresses, monkeypatch):
    monkeypatch.setattr(lerobot, "POLL_S", 0.1)
    stub = Stub(addresses, pretrained_name_or_path="x?session=steps").begin()
    stub.send(observation(3))
    first = stub.receive()
    stub.send(observation(3, must_go=False))
    assert not stub.stub.GetActions(services_pb2.Empty()).data
    stub.send(observation(3))
    assert torch.equal(stub.receive()[0].get_action(), first[0].get_action())  # the same decision


class Slow(InProcess):
    """Delays each computation."""

    def __init__(self, service):
        super().__init__(service)
        self.began = threading.Event()

    async def remote(self, requests):
        self.began.set()
        await asyncio.sleep(0.3)
        return await super().remote(requests)


def test_observation_of_a_step_in_computation_is_skipped(service, monkeypatch):
    monkeypatch.setattr(lerobot, "POLL_S", 0.5)
    with served(service, handle := Slow(service)) as addresses, ThreadPoolExecutor() as threads:
        stub = Stub(addresses).begin()
        stub.send(observation(3))
        actions = threads.submit(stub.receive)
        assert handle.began.wait(60)
        stub.send(observation(3, must_go=False))
        assert len(actions.result()) == 5
        assert not stub.stub.GetActions(services_pb2.Empty()).data and len(handle.requests) == 1


def test_token_is_read_from_policy_name(service, handle):
    with served(service, handle, TOKEN) as addresses:
        Stub(addresses, pretrained_name_or_path=f"x?token={TOKEN}").begin()
        for name in ("x", "x?token=wrong-wrong-wrong"):
            with pytest.raises(grpc.RpcError, match="token is missing or wrong: --pretrained_name_or_path"):
                Stub(addresses, pretrained_name_or_path=name).begin()


def test_oldest_session_stays_if_it_is_active(service, handle, monkeypatch):
    monkeypatch.setattr(lerobot, "MOST_CLIENTS", 2)
    with served(service, handle) as addresses:
        first, *recent = (Stub(addresses, pretrained_name_or_path=f"x?session={i}") for i in range(4))
        first.begin()
        for other in recent:
            other.begin()
            first.send(observation())
        with pytest.raises(grpc.RpcError, match="this connection has no session"):
            recent[0].send(observation())
        metrics = f"http://127.0.0.1:{addresses.port}/metrics"
        assert 'vla_sessions{protocol="lerobot"} 2.0' in urllib.request.urlopen(metrics).read().decode()
        recent[-1].stub.Ready(services_pb2.Empty())
        assert 'vla_sessions{protocol="lerobot"} 1.0' in urllib.request.urlopen(metrics).read().decode()


def test_oversized_observation_is_refused_and_session_continues(service, handle):
    small = make_service(service.sources[""].folder, "--serve.max_message_mb=0.1")
    with served(small, handle) as addresses:
        stub = Stub(addresses).begin()
        with pytest.raises(grpc.RpcError, match="more than 100,000 bytes, --serve.max_message_mb"):
            stub.send(observation(top=np.zeros((200, 200, 3), np.uint8)))
        stub.send(observation())
        assert len(stub.receive()) == 5
        page = urllib.request.urlopen(f"http://127.0.0.1:{addresses.port}/metrics").read().decode()
    for outcome in ("refused", "ok"):
        assert f'vla_requests_total{{outcome="{outcome}",robot=""}} 1.0' in page


# ---- pickles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_robot_client_pickle_is_read_as_by_pickle(protocol):
    raw = {"a": 1.0, "b": np.float32(2), "image": camera_image("top"), "f": np.asfortranarray(np.ones((2, 3))),
           "strided": np.arange(6.0).reshape(3, 2)[::2], "bytes": np.arange(3, dtype=">i2"), "task": "go"}  # fmt: skip
    read = read_pickle(pickle.dumps(TimedObservation(1.5, 3, raw, must_go=True), protocol), "TimedObservation")
    assert (read["timestamp"], read["timestep"], read["must_go"]) == (1.5, 3, True)
    for name, value in raw.items():
        np.testing.assert_array_equal(read["observation"][name], value)
        assert getattr(read["observation"][name], "dtype", None) == getattr(value, "dtype", None)


class Calls:
    def __init__(self, function, *arguments):
        self._call = function, arguments

    def __reduce__(self):
        return self._call


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (Calls(os.system, "touch ran"), "names posix.system, which no message of LeRobot's"),
        (Calls(eval, "1"), "names builtins.eval"),
        (observation(x=Calls(os.system, "touch ran")), "names posix.system"),
        (observation(x=torch.zeros(2)), "names torch"),
        (observation(x=np.array([object()])), "names builtins.object|of type '.O8'"),
        (RemotePolicyConfig("a", "b", {}, 1), "is no TimedObservation"),
        ({"timestep": 0}, "is no TimedObservation"),
    ],
)
def test_pickled_calls_are_not_executed(sent, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=error):
        read_pickle(pickle.dumps(sent), "TimedObservation")
    assert not list(tmp_path.iterdir())


def test_pickle_cannot_set_class_attributes():
    sets = b"\x80\x04\x8c\x05numpy\x8c\x07ndarray\x93N}\x8c\x04name\x8c\x01x\x86s\x86b."
    with pytest.raises(ValueError, match="no pickle of|sets attributes of a type"):
        read_pickle(sets, "TimedObservation")
    with pytest.raises(ValueError, match="sets attributes of a dict: refused"):
        read_pickle(b"\x80\x04}}b.", "TimedObservation")
