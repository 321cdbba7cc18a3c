"""Loading and saving of policies against LeRobot's own."""

import copy
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from lerobot.configs import PreTrainedConfig
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.utils.constants import ACTION, OBS_STATE
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.memory import takes_at_most
from tests.tiny import ACTION_DIM, STATE_DIM, make_batch, make_policy
from vla_finetuning.policies import saving
from vla_finetuning.policies.loading import (
    fetch_pretrained,
    load_policy,
    load_policy_config,
    make_policy_config,
    new_policy,
    read_weights,
)
from vla_finetuning.policies.pipelines import make_processors
from vla_finetuning.policies.saving import save_pretrained
from vla_finetuning.policies.tiny_pi05 import TinyPI05Policy

EMBEDDING = "model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
LANGUAGE_HEAD = "model.paligemma_with_expert.paligemma.lm_head.weight"
ONE_KEY = "model.action_in_proj.weight"


def stats(width):
    return {"q01": -np.ones(width, np.float32), "q99": np.ones(width, np.float32)}


STATS = {OBS_STATE: stats(STATE_DIM), ACTION: stats(ACTION_DIM)}


@pytest.fixture(scope="module")
def original():
    return make_policy(2)


@pytest.fixture(scope="module")
def saved(original, tmp_path_factory):
    """A pretrained folder, written by LeRobot."""
    folder = tmp_path_factory.mktemp("policy") / "base"
    original.save_pretrained(folder)
    for pipeline, name in zip(make_processors(None, original.config, STATS), ("pre", "post"), strict=True):
        pipeline.save_pretrained(folder, config_filename=f"policy_{name}processor.json")
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "base"))


def read_config(folder):
    return PreTrainedConfig.from_pretrained(folder, cli_overrides=["--device=cpu"])


def load(folder):
    return load_policy(folder, read_config(folder))


def assert_same_weights(actual, expected):
    actual, expected = actual.state_dict(), expected.state_dict()
    assert list(actual) == list(expected)
    for key, tensor in expected.items():
        assert actual[key].dtype == tensor.dtype and torch.equal(actual[key], tensor), key


# --- fetch ------------------------------------------------------------------------------------------------


def test_local_policy_folder_is_used_in_place(saved):
    assert fetch_pretrained(str(saved)) == (saved, None)
    with pytest.raises(ValueError, match="local folder, which has no revision 'main'"):
        fetch_pretrained(str(saved), "main")


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        *itertools.product(
            ["/no/such/folder", "./missing", "a/b/c", "name", "https:/x"],
            [FileNotFoundError],
            ["no folder and no Hub id of the form owner/name"],
        ),
        ("http://bucket/policy", ValueError, "http://bucket/policy: expected a path, s3://BUCKET/FOLDER, gs://"),
        (str(Path(__file__).parent), FileNotFoundError, "no config.json among"),
    ],
)
def test_invalid_policy_path_is_refused(path, kind, message):
    with pytest.raises(kind, match=message):
        fetch_pretrained(path)


def test_hub_policy_is_pinned_to_commit(saved, monkeypatch):
    commit, info, download = "ab" * 20, Mock(), Mock(return_value=str(saved))
    info.return_value.resolved = commit
    monkeypatch.setattr(huggingface_hub.HfApi, "resolve_revision", info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    def check_config(folder):
        assert folder == saved and download.call_args.kwargs["allow_patterns"] == ["config.json"]

    assert fetch_pretrained("lerobot/pi05_base", "v1", check_config) == (saved, commit)
    info.assert_called_once_with("lerobot/pi05_base", repo_type="model", revision="v1", cache_dir=None)
    patterns = download.call_args.kwargs["allow_patterns"]
    download.assert_called_with("lerobot/pi05_base", repo_type="model", revision=commit, allow_patterns=patterns)
    wanted = ["config.json", "model-00001-of-00002.safetensors", "tokenizer/tokenizer.json"]
    assert [*filter_repo_objects([*wanted, "pytorch_model.bin", "run.py"], allow_patterns=patterns)] == wanted


# --- load -------------------------------------------------------------------------------------------------


def test_policy_saved_by_lerobot_loads(saved, original):
    policy = load(saved)
    assert type(policy) is TinyPI05Policy and not policy.training
    assert_same_weights(policy, original)
    assert policy.config.device == "cpu"
    # Buffers that are not saved equal those that LeRobot builds.
    for (name, actual), expected in zip(policy.named_buffers(), original.buffers(), strict=True):
        assert torch.equal(actual, expected), name


def test_weights_with_published_key_names_load(folder, original):
    """Use the keys of lerobot/pi05_base: no `model.` prefix, the word embedding only as language head."""
    weights = load_file(folder / "model.safetensors")
    weights[LANGUAGE_HEAD] = weights.pop(EMBEDDING).clone()
    save_file({key.removeprefix("model."): tensor for key, tensor in weights.items()}, folder / "model.safetensors")
    policy = load(folder)
    expected = copy.deepcopy(original)
    expected.load_state_dict({LANGUAGE_HEAD: original.state_dict()[EMBEDDING]}, strict=False)
    assert_same_weights(policy, expected)
    assert_same_weights(policy, TinyPI05Policy.from_pretrained(folder))


def test_embedding_weights_take_precedence_over_language_head(folder, original):
    """LeRobot takes the later of both in a file; safetensors puts wider dtypes first."""
    weights = load_file(folder / "model.safetensors")
    weights[LANGUAGE_HEAD] = weights[LANGUAGE_HEAD].to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors")
    state = load(folder).state_dict()
    assert torch.equal(state[EMBEDDING], original.state_dict()[EMBEDDING])
    assert not torch.equal(state[LANGUAGE_HEAD], state[EMBEDDING])
    absent = TinyPI05Policy.from_pretrained(folder).state_dict()  # LeRobot loses the embedding
    assert torch.equal(absent[EMBEDDING], absent[LANGUAGE_HEAD])
    head = {LANGUAGE_HEAD: weights.pop(LANGUAGE_HEAD)}
    for name, tensors in (("a.safetensors", weights), ("b.safetensors", head)):
        save_file(tensors, folder / name)
    names = {**dict.fromkeys(weights, "a.safetensors"), LANGUAGE_HEAD: "b.safetensors"}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert torch.equal(load(folder).state_dict()[EMBEDDING], original.state_dict()[EMBEDDING])


def test_bfloat16_weights_load_into_policy_precision(folder, original):
    weights = load_file(folder / "model.safetensors")
    save_file({key: tensor.to(torch.bfloat16) for key, tensor in weights.items()}, folder / "model.safetensors")
    policy = load(folder)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    expected = original.state_dict()[ONE_KEY].to(torch.bfloat16).float()
    assert torch.equal(policy.state_dict()[ONE_KEY], expected)


def test_sharded_weights_load_and_damaged_index_is_refused(folder, original):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    huggingface_hub.save_torch_state_dict(weights, folder, max_shard_size=2**18)
    assert_same_weights(load(folder), original)
    index, (absent,) = folder / "model.safetensors.index.json", folder.glob("model-00002-of-*.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**weight_map, "x": "../../elsewhere.safetensors"}}))
    with pytest.raises(ValueError, match="names '../../elsewhere.safetensors'.*its own folder"):
        load(folder)
    absent.unlink()
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(FileNotFoundError, match=f"names {absent.name}, which is not there"):
        load(folder)
    index.write_text("[]")
    with pytest.raises(ValueError, match="no index of safetensors shards"):
        load(folder)


WEIGHTS = {
    "missing": (lambda w: {key: w[key] for key in w if key != ONE_KEY}, f"1 missing: {ONE_KEY}"),
    "unexpected": (lambda w: {**w, "model.extra": torch.zeros(1)}, "1 unexpected: model.extra"),
    "shape": (lambda w: {**w, ONE_KEY: torch.zeros(2, 2)}, r"another shape: .* \(found \(2, 2\), expected \(32, 32\)"),
    "nan": (lambda w: {**w, ONE_KEY: torch.full((32, 32), torch.nan)}, f"{ONE_KEY} in .* not finite"),
    "another policy": (
        lambda w: {f"other.{number}": torch.zeros(1) for number in range(9)},
        r"\d{3} missing: .*, \.\.\.; 9 unexpected: model.other.0, .*, \.\.\..*Nothing was loaded",
    ),
}
FILES = {
    "truncated": (lambda file: file.write_bytes(file.read_bytes()[:-100]), "model.safetensors is truncated"),
    "gone": (lambda file: file.unlink(), r"no model.safetensors in .*, found \['config.json'"),
    "pickled": (
        lambda file: file.rename(file.with_name("pytorch_model.bin")),
        "pytorch_model.bin.*pickled weights .* are never loaded",
    ),
}


@pytest.mark.parametrize("name", [*WEIGHTS, *FILES])
def test_invalid_weights_are_refused(name, folder):
    file = folder / "model.safetensors"
    damage, message = {**WEIGHTS, **FILES}[name]
    if name in WEIGHTS:
        save_file(damage(load_file(file)), file)
    else:
        damage(file)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load(folder)
    if name not in ("unexpected", "nan"):
        # LeRobot goes on with random weights here.
        assert isinstance(TinyPI05Policy.from_pretrained(folder), TinyPI05Policy)


def test_loading_skips_random_initialisation(saved, monkeypatch):
    drawn = []
    monkeypatch.setattr(torch.nn.init, "normal_", lambda tensor, *a, **k: drawn.append(tensor) or tensor)
    monkeypatch.setattr(torch.nn.init, "kaiming_uniform_", lambda tensor, *a, **k: drawn.append(tensor) or tensor)
    load(saved)
    assert not drawn
    new_policy(read_config(saved))
    assert drawn


# --- save -------------------------------------------------------------------------------------------------


def export(policy, saved, target):
    save_pretrained(policy, *make_processors(saved, policy.config, STATS), target)
    return target


@pytest.mark.gate
def test_lerobot_loads_export_in_fresh_process(original, saved, folder, tmp_path):
    """Load a moved export without its base; only `tiny_pi05` is imported, to register the type."""
    target = Path(shutil.move(export(original, folder, tmp_path / "pretrained_model"), tmp_path / "moved"))
    shutil.rmtree(folder)
    batch, _, _ = make_batch(original, rows=2)
    observation = {key: value[:1] for key, value in batch.items() if "images" in key}
    observation |= {OBS_STATE: torch.full((1, STATE_DIM), 0.3)}
    save_file(observation, tmp_path / "observation.safetensors")
    code = f"""
import sys, torch
sys.path.insert(0, {str(Path(saving.__file__).parent)!r})
import tiny_pi05
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from safetensors.torch import load_file, save_file
config = PreTrainedConfig.from_pretrained({str(target)!r})
policy = get_policy_class(config.type).from_pretrained({str(target)!r}, config=config)
pre, post = make_pre_post_processors(config, {str(target)!r})
batch = pre({{**load_file({str(tmp_path / "observation.safetensors")!r}), "task": ["go to the red bin"]}})
torch.manual_seed(0)
save_file({{"action": post(policy.predict_action_chunk(batch))}}, {str(tmp_path / "action.safetensors")!r})
assert not {{"vla_finetuning", "loading", "processors", "pi05"}} & set(sys.modules)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 0, process.stderr[-2000:]
    assert "All keys loaded successfully" in process.stdout
    preprocessor, postprocessor = make_processors(saved, original.config, STATS)
    torch.manual_seed(0)
    chunk = original.predict_action_chunk(preprocessor({**observation, "task": ["go to the red bin"]}))
    torch.testing.assert_close(
        load_file(tmp_path / "action.safetensors")["action"], postprocessor(chunk), rtol=1e-5, atol=1e-6
    )


def stored(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {key: (tuple(file.get_slice(key).get_shape()), file.get_slice(key).get_dtype()) for key in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("dtype, stored_as", [("float32", {"F32"}), ("bfloat16", {"F32", "BF16"})])
def test_exported_keys_shapes_and_dtypes_equal_lerobot(dtype, stored_as, saved, tmp_path):
    policy = make_policy(2, dtype=dtype)
    policy.save_pretrained(tmp_path / "theirs")
    actual = stored(export(policy, saved, tmp_path / "ours"))
    assert actual == stored(tmp_path / "theirs")
    assert {kind for _, kind in actual.values()} == stored_as


def test_export_has_usual_file_permissions(original, saved, tmp_path, assert_usual_permissions):
    folder = export(original, saved, tmp_path / "run" / "pretrained_model")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert_usual_permissions(folder.parent)


def test_trained_embedding_survives_loading_by_lerobot(original, saved, tmp_path):
    """LeRobot copies the language head over the embedding unless the embedding comes later in the file."""
    target = export(original, saved, tmp_path / "policy")
    actual = TinyPI05Policy.from_pretrained(target).state_dict()
    assert torch.equal(actual[EMBEDDING], original.state_dict()[EMBEDDING])
    assert_same_weights(load(target), TinyPI05Policy.from_pretrained(target))


def test_export_contains_no_local_paths(original, saved, tmp_path):
    policy = copy.deepcopy(original)
    policy.config.pretrained_path = saved
    target = export(policy, saved, tmp_path / "policy")
    assert sorted(file.name for file in target.iterdir()) == [
        "config.json",
        "model.safetensors",
        "policy_postprocessor.json",
        "policy_postprocessor_step_0_unnormalizer_processor.safetensors",
        "policy_preprocessor.json",
        "policy_preprocessor_step_3_normalizer_processor.safetensors",
    ]
    config = json.loads((target / "config.json").read_text())
    assert config["device"] is None and config["pretrained_path"] is None and config["type"] == "tiny_pi05"
    for file in target.glob("*.json"):
        assert str(tmp_path) not in file.read_text() and str(saved) not in file.read_text()
    assert policy.config.pretrained_path == saved  # the policy in memory is unchanged


def test_export_replaces_previous_one_only_on_success(original, saved, tmp_path, monkeypatch):
    target = export(original, saved, tmp_path / "policy")
    (target / "old").touch()
    monkeypatch.setattr(saving, "save_model", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        export(original, saved, target)
    assert (target / "old").exists() and (target / "model.safetensors").exists()
    monkeypatch.undo()
    export(original, saved, target)
    assert not (target / "old").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["policy"]


def test_config_equals_lerobot_and_leaves_no_temporary_file(tmp_path, monkeypatch):
    saved = PI05Config(device="cpu", chunk_size=20, n_action_steps=10)
    saved._save_pretrained(tmp_path)
    theirs = PreTrainedConfig.from_pretrained(tmp_path, cli_overrides=["--chunk_size=30", "--device=cpu"])
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    assert load_policy_config(tmp_path, ["--chunk_size=30"]) == theirs and theirs.chunk_size == 30
    assert not list(scratch.iterdir())


@pytest.mark.parametrize(
    ("option", "is_parsed"),
    [
        ("--rtc_config.enabled=true", lambda config: config.rtc_config.enabled is True),
        ("--rtc_config=null", lambda config: config.rtc_config is None),
        ("--repo_id=1e3", lambda config: config.repo_id == "1e3"),
        ("--compile_mode=include x", lambda config: config.compile_mode == "include x"),
        ("--optimizer_betas=[0.8, 0.9]", lambda config: tuple(config.optimizer_betas) == (0.8, 0.9)),
        ("--compile_model=True", lambda config: config.compile_model is True),
        ("--optimizer_lr=1e-3", lambda config: config.optimizer_lr == 1e-3),
        ("--rtc_training_max_delay=49", lambda config: copy.deepcopy(config).rtc_training_max_delay == 49),
        ("--chunk_size=60", lambda config: config.rtc_training_max_delay == 0),
    ],
)
def test_policy_options_are_parsed_as_values(option, is_parsed):
    assert is_parsed(make_policy_config("pi05", [option]))


@pytest.mark.parametrize(
    ("policy_type", "value", "error"),
    [
        ("pi05", "50", "=50: expected a whole number of actions from 0 to 49, .*--policy.chunk_size=50"),
        ("pi05", "-1", "=-1: expected a whole number of actions from 0 to 49"),
        ("pi05", "1.5", "=1.5: expected a whole number of actions from 0 to 49"),
        ("pi0", "3", ": no option of PI0Config"),
    ],
)
def test_rtc_training_max_delay_outside_chunk_is_refused(policy_type, value, error):
    with pytest.raises(ValueError, match=f"--policy.rtc_training_max_delay{error}"):
        make_policy_config(policy_type, [f"--rtc_training_max_delay={value}"])


@pytest.mark.parametrize(
    ("field", "value"), [("chunk_size", 50_000_000), ("empty_cameras", 10_000_000), ("depth", 100_000)]
)
def test_excessive_config_sizes_are_refused_before_allocation(folder, field, value):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ValueError, match=f"config.json: {field} is {value:,}, more than the"):
        load_policy_config(folder)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{field} is {value:,}, more than the"):
        load_policy_config(folder, [f"--{field}={value}"])


def test_oversized_safetensors_header_is_not_parsed(folder):
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"t{i}": entry for i in range(200_000)}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with takes_at_most(50), pytest.raises(ValueError, match="claims a header of 1. MiB, more than the 8 MiB"):
        read_weights(folder)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(["config.json", "policy_preprocessor.json", "model.safetensors.index.json"], ["deep"]),
        *itertools.product(["config.json", "model.safetensors.index.json"], ["pipe"]),
    ],
)
def test_deeply_nested_json_and_pipes_are_refused(folder, name, kind):
    (folder / name).unlink(missing_ok=True)
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    if kind == "deep":
        (folder / name).write_text("[" * 200_000)
    else:
        os.mkfifo(folder / name)
    message = "nested too deep" if kind == "deep" else "is not a regular file|no model.safetensors"
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        config = load_policy_config(folder)
        make_processors(folder, config, STATS)
        read_weights(folder)
