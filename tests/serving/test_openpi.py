"""openpi's protocol with openpi's own client, against in-process chunks; errors."""

import json
import urllib.error
import urllib.request

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import connect

from tests.rollouts.test_player import observed
from tests.serving.servers import InProcess, make_export, make_service, served
from vla_finetuning.envs.protocol import select_rows
from vla_finetuning.serving.openpi import pack, unpack
from vla_finetuning.serving.replicas import Request, compute

INSTRUCTION = "go to the red bin"
TOKEN = "0123456789abcdef"


def message(row=0, **changes):
    observation = select_rows(observed(), [row])
    images = {f"observation.images.{name}": image[0] for name, image in observation["pixels"].items()}
    return {**images, "observation.state": observation["agent_pos"][0], "prompt": INSTRUCTION, **changes}


def without(name):
    return {key: value for key, value in message().items() if key != name}


def folder_of(service):
    return service.sources[""].folder


@pytest.fixture(scope="module")
def openpi():
    return pytest.importorskip("openpi_client.websocket_client_policy", reason="openpi's client: make openpi")


def expected(service, session, decision, row=0, robot="", instruction=INSTRUCTION):
    """Predict the chunk in process."""
    player = service.sources[robot].load(1)
    return player(select_rows(observed(), [row]), [instruction], [(service.config.seed, session, 0, decision)])[0]


def test_openpi_client_receives_in_process_chunk(openpi, service, addresses):
    client = openpi.WebsocketClientPolicy(f"ws://127.0.0.1:{addresses.port}/?session=ours")
    about = client.get_server_metadata()
    assert about["session"] == "ours" and about["sees"]["observation.state"] == 3
    for decision in range(2):
        actual = client.infer(message(decision))["actions"]
        np.testing.assert_array_equal(actual, expected(service, "ours", decision, decision))
        assert actual.shape == (about["chunk_size"], 3) and actual.dtype == np.float32


# What `openpi_client.msgpack_numpy` 0.1.2 packed {"state": np.arange(3, dtype=np.float32), "prompt": "go"} into.
GOLDEN = bytes.fromhex(
    "82a5737461746584c40b5f5f6e6461727261795f5fc3c40464617461c40c000000000000803f00000040c4056474797065a33c6634c4"
    "0573686170659103a670726f6d7074a2676f"
)


def test_messages_match_openpi_packer():
    sent = {"state": np.arange(3, dtype=np.float32), "prompt": "go"}
    assert pack(sent) == GOLDEN
    read = unpack(GOLDEN)
    np.testing.assert_array_equal(read["state"], sent["state"])
    assert read["prompt"] == "go" and read["state"].dtype == np.float32


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (GOLDEN[:-3], "not in openpi's msgpack format"),
        (pack([1]), "is a list: send a dictionary"),
        (pack({"state": {b"__ndarray__": True, b"data": bytes(8), b"dtype": "|O", b"shape": [1]}}), "of type '.O'"),
        (pack({"state": {b"__ndarray__": True, b"data": b"", b"dtype": "<f4", b"shape": [9]}}), "has 36 bytes, not 0"),
        (pack({"state": {b"__ndarray__": True, b"data": b"", b"dtype": "<f4", b"shape": [-1]}}), "shape ..1.: send"),
    ],
)
def test_damaged_or_hostile_message_is_refused(data, error):
    with pytest.raises(ValueError, match=error):
        unpack(data)


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (without("observation.images.top"), "lacks observation.images.top; it has .* --rename_map"),
        (message(**{"observation/images/tops": np.zeros((8, 8, 3), np.uint8)}), "no such camera.*did you mean"),
        (message(**{"observation.images.top": np.zeros((8, 8, 3), np.float32)}), "is float32 .8, 8, 3.: send RGB"),
        (message(**{"observation.state": np.zeros(7, np.float32)}), "has 7 entries.*trained with 3 .x, y, z.:"),
        (message(**{"observation.state": np.full(3, np.nan)}), "not finite"),
        (message(**{"observation.state": [[1.0], [2.0, 3.0]]}), "'observation.state' is list: send a vector"),
        (without("prompt"), "needs an instruction.*there is none"),
        (message(prompt=3), "needs an instruction.*it is int"),
        (message(**{f"x{i}": 0.0 for i in range(100_000)}), "has more than 1000 names"),
        (message(prompt="go " * 1000), "has 3,000 characters"),
        (message(prompt="go " * 100), "has 111 tokens, more than"),
    ],
)
def test_invalid_request_is_refused_and_session_continues(openpi, service, addresses, sent, error):
    client = openpi.WebsocketClientPolicy(f"ws://127.0.0.1:{addresses.port}/?session=wrong")
    with pytest.raises(RuntimeError, match=error):
        client.infer(sent)
    np.testing.assert_array_equal(client.infer(message())["actions"], expected(service, "wrong", 0))


def test_request_that_fails_does_not_fail_its_batch(service, handle):
    read, key = service.interfaces[""].read, (service.config.seed, "batch", 0, 0)
    requests = [Request("", *read(message(prompt=text)), key) for text in (INSTRUCTION, "go " * 100, INSTRUCTION)]
    first, error, last = compute(handle._players, requests)
    for answer in (first, last):
        np.testing.assert_array_equal(answer.actions, expected(service, "batch", 0))
    assert "has 111 tokens, more than" in error


def test_foreign_names_are_mapped_and_vectors_joined(service, tmp_path):
    names = {"side": "observation.images.top", "joints": "observation.state", "gripper": "observation.state"}
    renamed = make_service(folder_of(service), "--rename_map", json.dumps(names))
    (interface,) = renamed.interfaces.values()
    sent = message()
    image, state = sent.pop("observation.images.top"), sent.pop("observation.state")
    nested = {"observation": {"images": {"front": sent.pop("observation.images.front").transpose(2, 0, 1)}}}
    actual, _ = interface.read({**sent, **nested, "gripper": state[2], "joints": state[:2], "side": image})
    plain, _ = next(iter(service.interfaces.values())).read(message())
    np.testing.assert_array_equal(actual["state"], plain["state"])
    for name, pixels in plain["pixels"].items():
        np.testing.assert_array_equal(actual["pixels"][name], pixels)
    with pytest.raises(ValueError, match="does not see; it sees .*did you mean observation.images.top"):
        make_service(folder_of(service), '--rename_map={"side": "observation.images.tops"}')


def test_rename_map_can_target_one_robot(tmp_path):
    both = make_export(tmp_path, "arm", "gantry")
    for name in ("policy_preprocessor.json", "config.json", "robot.json"):
        path = both / "gantry" / name
        path.write_text(path.read_text().replace("observation.images.top", "observation.images.hand"))
    interfaces = make_service(both, '--rename_map={"side": "observation.images.hand"}').interfaces
    assert interfaces["gantry"].rename_map == {"side": "observation.images.hand"}
    assert not interfaces["arm"].rename_map and "observation.images.top" in interfaces["arm"].cameras


def test_url_path_selects_robot(openpi, tmp_path):
    service = make_service(make_export(tmp_path, "arm", "gantry"))
    with served(service, handle := InProcess(service)) as addresses:
        client = openpi.WebsocketClientPolicy(f"ws://127.0.0.1:{addresses.port}/gantry?session=ours")
        assert client.get_server_metadata()["robot"] == "gantry"
        actual = client.infer(message())["actions"]
        with pytest.raises(ConnectionClosedError, match="which robot. 'leg' is none of arm, gantry"):
            openpi.WebsocketClientPolicy(f"ws://127.0.0.1:{addresses.port}/leg")
    np.testing.assert_array_equal(actual, expected(service, "ours", 0, robot="gantry"))
    first, second = (dict(player._policy.named_parameters()) for player in handle._players.values())
    assert all(first[name].data_ptr() == second[name].data_ptr() for name in first)


def test_token_protects_all_endpoints_but_health(openpi, service, handle):
    with served(service, handle, TOKEN) as addresses:
        url = f"127.0.0.1:{addresses.port}"
        client = openpi.WebsocketClientPolicy("127.0.0.1", addresses.port, api_key=TOKEN)
        assert client.infer(message())["actions"].shape[1] == 3
        for key in (None, "wrong-wrong-wrong"):
            with pytest.raises(InvalidStatus, match="401"):
                openpi.WebsocketClientPolicy("127.0.0.1", addresses.port, api_key=key)
        assert urllib.request.urlopen(f"http://{url}/healthz").read() == b"OK\n"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://{url}/metrics")
        request = urllib.request.Request(f"http://{url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
        assert 'vla_requests_total{outcome="ok",robot=""} 1.0' in urllib.request.urlopen(request).read().decode()


def test_non_local_address_requires_token(service, monkeypatch):
    # The policy name in LeRobot's protocol cannot contain & and #.
    for token, message in (
        ("", "opens the server to other machines: set VLA_SERVE_TOKEN"),
        ("short", "has 5 characters: give at least 16"),
        ("0123456789&abcdef", "give letters and digits, as `openssl rand -hex 16`"),
        (f"{TOKEN}#", "give letters and digits, as `openssl rand -hex 16`"),
    ):
        monkeypatch.setenv("VLA_SERVE_TOKEN", token)
        with pytest.raises(ValueError, match=message):
            make_service(folder_of(service), "--serve.host=0.0.0.0")
    monkeypatch.setenv("VLA_SERVE_TOKEN", "abc/def=0123456789==")
    make_service(folder_of(service), "--serve.host=0.0.0.0")


def test_ipv6_address_and_occupied_port(openpi, service, handle):
    with served(make_service(folder_of(service), "--serve.host=::1"), handle) as addresses:
        assert addresses.host == "[::1]"
        client = openpi.WebsocketClientPolicy(f"ws://[::1]:{addresses.port}")
        assert client.infer(message())["actions"].shape[1] == 3
        with pytest.raises(OSError, match=rf"--serve.host=::1 --serve.port={addresses.port}: .*: give another"):
            make_service(folder_of(service), "--serve.host=::1", f"--serve.port={addresses.port}")


def test_browser_origin_is_refused(addresses):
    with pytest.raises(InvalidStatus, match="403"):
        connect(f"ws://127.0.0.1:{addresses.port}", origin="http://example.com")


def test_oversized_message_closes_its_connection_alone(openpi, service, handle):
    small = make_service(folder_of(service), "--serve.max_message_mb=0.1")
    with served(small, handle) as addresses:
        client, other = (openpi.WebsocketClientPolicy("127.0.0.1", addresses.port) for _ in range(2))
        with pytest.raises(ConnectionClosedError, match="1009.*exceeds limit of 100000 bytes"):
            client.infer(message(**{"observation.images.top": np.zeros((200, 200, 3), np.uint8)}))
        assert other.infer(message())["actions"].shape[1] == 3
