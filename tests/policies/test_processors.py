"""The split preprocessor against LeRobot's DataLoader and pipeline, bit for bit."""

import contextlib
import json
import pickle
import shutil
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from huggingface_hub.errors import GatedRepoError
from lerobot.configs import NormalizationMode, PreTrainedConfig
from lerobot.datasets import LeRobotDataset, LeRobotDatasetMetadata
from lerobot.lerobot_types import TransitionKey
from lerobot.policies.factory import make_pre_post_processors
from lerobot.processor import ProcessorStep
from lerobot.processor.tokenizer_processor import TokenizerProcessorStep
from transformers import AutoTokenizer

from tests.datasets import make_dataset
from tests.tiny import make_base
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.policies import tokenizer_check
from vla_finetuning.policies.pipelines import check_prompts_differ, load_processors, make_processors
from vla_finetuning.policies.processors import DeviceHalf, Prepare, required_stats
from vla_finetuning.policies.remote_code import remote_code
from vla_finetuning.policies.saving import save_pretrained
from vla_finetuning.policies.tiny_pi05 import TinyPI05Policy, make_tokenizer
from vla_finetuning.policies.tokenizer_check import check_tokenizer

TOKENS, MASK = "observation.language.tokens", "observation.language.attention_mask"
TOP, WRIST = "observation.images.top", "observation.images.wrist"
CHUNK = 8


@dataclass
class Case:
    """A dataset, a tiny policy for it, and LeRobot's batches."""

    root: Path
    folder: Path
    meta: LeRobotDatasetMetadata
    config: PreTrainedConfig

    def rows(self, indices):
        """Read columns as the data engine emits them, from LeRobot's dataset."""
        dataset = self.dataset(return_uint8=True)
        items = [dataset[i] for i in indices]
        columns = {}
        for key in items[0]:
            if key == "task":
                columns[key] = np.array([item[key] for item in items], dtype=object)
            else:
                columns[key] = np.stack([np.asarray(item[key]) for item in items])
        for key in self.meta.camera_keys:
            columns[key] = np.ascontiguousarray(np.moveaxis(columns[key], 1, -1))
        columns["dataset_index"] = np.zeros(len(items), dtype=np.int32)
        columns["position"] = np.arange(len(items))
        return columns

    def dataset(self, **options):
        deltas = {"action": [i / self.meta.fps for i in range(CHUNK)]}
        return LeRobotDataset("local/test", root=self.root, video_backend="pyav", delta_timestamps=deltas, **options)

    def lerobots_batch(self, indices, preprocessor):
        """Make the batch that `lerobot-train` passes to `policy.forward`."""
        loader = torch.utils.data.DataLoader(self.dataset(), batch_size=len(indices), sampler=indices)
        return preprocessor(next(iter(loader)))


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processors")
    root = make_dataset(folder / "dataset", episodes=(9, 5, 3))
    meta = LeRobotDatasetMetadata("local/test", root=root)
    base = make_base(folder / "base", load_metadata(root), chunk_size=CHUNK)
    config = PreTrainedConfig.from_pretrained(base, cli_overrides=["--device=cpu"])
    return Case(root, base, meta, config)


def assert_equal(actual, expected):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert torch.equal(actual, expected)


INDICES = [0, 8, 16, 4, 13]  # the last frames of episodes among them


# --- what reaches the policy ------------------------------------------------------------------------------


def split(case, preprocessor, columns):
    prepare = Prepare(preprocessor, case.meta.camera_keys, case.config)
    prepared = prepare(columns)
    tensors = {key: torch.from_numpy(value) for key, value in prepared.items()}
    return prepared, DeviceHalf(preprocessor, case.config)(tensors)


def test_prepared_batch_equals_lerobot_bitwise(case):
    preprocessor, _ = make_processors(case.folder, case.config, case.meta.stats)
    columns = case.rows(INDICES) | {"observation.force": np.zeros((len(INDICES), 2), np.float32)}
    prepared, actual = split(case, preprocessor, columns)
    expected = case.lerobots_batch(INDICES, preprocessor)
    keys = {TOP, WRIST, "observation.state", "action", "action_is_pad", TOKENS, MASK, "index"}
    assert set(actual) == keys | {"dataset_index", "position"}
    for key in keys:
        assert_equal(actual[key], expected[key])
    assert expected["action_is_pad"].any() and expected[MASK].any() and not expected[MASK].all()
    assert actual["action"].abs().max() < 50 and not torch.equal(actual["action"], torch.from_numpy(columns["action"]))
    for key, value in prepared.items():
        assert value.dtype.kind in "biuf", key
        assert len(value) == len(INDICES)
    assert prepared[TOP] is columns[TOP]


def test_integer_columns_are_normalised_as_floats(case):
    """LeRobot's normaliser casts its statistics to int64 for them, and a deviation of 0.49 is 0."""
    preprocessor, _ = make_processors(case.folder, case.config, case.meta.stats)
    columns = case.rows(INDICES)
    rounded = {key: columns[key].round() for key in ("observation.state", "action")}
    expected, _ = split(case, preprocessor, {**columns, **rounded})
    actual, _ = split(case, preprocessor, {**columns, **{k: v.astype(np.int64) for k, v in rounded.items()}})
    assert actual.keys() == expected.keys()
    for key, values in expected.items():
        assert actual[key].dtype == values.dtype
        np.testing.assert_array_equal(actual[key], values, err_msg=key)


@pytest.mark.parametrize("mode", ["MEAN_STD", "QUANTILE10"])
def test_normalised_images_equal_lerobot_bitwise(case, mode):
    config = PreTrainedConfig.from_pretrained(case.folder, cli_overrides=["--device=cpu"])
    config.normalization_mapping = {**config.normalization_mapping, "VISUAL": NormalizationMode(mode)}
    stats = {key: dict(value) for key, value in case.meta.stats.items()}
    stats[WRIST]["q90"] = stats[WRIST]["q90"].copy()
    stats[WRIST]["q90"][1] = stats[WRIST]["q10"][1]  # a channel without contrast
    preprocessor, _ = make_processors(case.folder, config, stats)
    _, actual = split(replace(case, config=config), preprocessor, case.rows(INDICES))
    expected = case.lerobots_batch(INDICES, preprocessor)
    for key in (TOP, WRIST, "action", TOKENS):
        assert_equal(actual[key], expected[key])
    assert expected[TOP].min() < 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_image_bytes_convert_as_in_lerobot(case, device):
    image = torch.arange(256, dtype=torch.uint8).repeat(3).reshape(1, 16, 16, 3)
    half = DeviceHalf(None, case.config).to(device)
    actual = half({TOP: image.to(device)})[TOP].cpu()
    assert actual.is_contiguous() and actual.dtype == torch.float32
    assert torch.equal(actual, image.movedim(-1, 1).to(torch.float32) / 255.0)
    assert half({TOP: actual})[TOP] is actual  # floats are unchanged


# --- Prepare as a function of blocks ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepare(case):
    preprocessor, _ = make_processors(case.folder, case.config, case.meta.stats)
    return Prepare(preprocessor, case.meta.camera_keys, case.config)


def test_prepare_treats_blocks_independently_and_read_only(case, prepare):
    columns = case.rows(INDICES)
    undivided = prepare(columns)
    for value in columns.values():
        value.flags.writeable = False
    before = {key: value.copy() for key, value in columns.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts = [prepare({key: value[rows] for key, value in columns.items()}) for rows in (slice(0, 2), slice(2, 5))]
    for key, expected in undivided.items():
        np.testing.assert_array_equal(np.concatenate([part[key] for part in parts]), expected)
    for key, value in before.items():
        np.testing.assert_array_equal(columns[key], value)


def test_prepare_of_empty_block_yields_same_columns(case, prepare):
    columns = case.rows([0])
    full, empty = prepare(columns), prepare({key: value[:0] for key, value in columns.items()})
    forms = [{key: (value.dtype, value.shape[1:]) for key, value in block.items()} for block in (empty, full)]
    assert forms[0] == forms[1] and {len(value) for value in empty.values()} == {0}


def test_prepare_refuses_invalid_blocks(case, prepare):
    columns = case.rows([0, 1])
    with pytest.raises(ValueError, match=f"no camera '{WRIST}'"):
        prepare({key: value for key, value in columns.items() if key != WRIST})
    with pytest.raises(ValueError, match=rf"camera '{TOP}' is float32 \(2, 48, 64, 3\), expected uint8"):
        prepare({**columns, TOP: columns[TOP].astype(np.float32)})
    with pytest.raises(ValueError, match=r"'task' holds values that are not strings"):
        prepare({**columns, "task": np.array(["go", None], dtype=object)})


@pytest.mark.parametrize("key", ["observation.state", "action"])
def test_non_finite_value_is_reported_with_its_frame(case, prepare, key):
    columns = case.rows([0, 11])  # the second: frame 2 of episode 1
    columns[key][1].flat[-1] = np.nan
    with pytest.raises(ValueError, match=f"'{key}' holds NaN.* at dataset_index 0, episode_index 1, frame_index 2, "):
        prepare(columns)
    prepare({**columns, "is_skipped": np.array([False, True])})


class MeanOfImage(ProcessorStep):
    def __call__(self, transition):
        observation = transition[TransitionKey.OBSERVATION]
        if TOP in observation:
            observation = {**observation, "observation.state": observation["observation.state"] + 1}
        return {**transition, TransitionKey.OBSERVATION: observation}

    def transform_features(self, features):
        return features


def test_pipeline_that_reads_images_is_refused(case):
    preprocessor, _ = make_processors(case.folder, case.config, case.meta.stats)
    preprocessor.steps = [MeanOfImage(), *preprocessor.steps]
    with pytest.raises(ValueError, match=r"returns another 'observation.state'.*MeanOfImage"):
        Prepare(preprocessor, case.meta.camera_keys, case.config)


# --- pickling into tasks ----------------------------------------------------------------------------------


def test_pickled_prepare_contains_no_data_of_blocks(case):
    preprocessor, _ = make_processors(case.folder, case.config, case.meta.stats)
    fresh = Prepare(preprocessor, case.meta.camera_keys, case.config)
    columns = {key: np.repeat(column, 100, axis=0) for key, column in case.rows(INDICES).items()}
    preprocessor({key: torch.from_numpy(v) if key != "task" else list(v) for key, v in columns.items()})
    used = Prepare(preprocessor, case.meta.camera_keys, case.config)
    assert all(step._current_transition is None for step in pickle.loads(pickle.dumps(used))._pipeline.steps)
    rows = sum(column.nbytes for key, column in columns.items() if column.dtype.kind == "f")
    assert abs(len(pickle.dumps(used)) - len(pickle.dumps(fresh))) < rows


# --- make_processors --------------------------------------------------------------------------------------


def test_processors_equal_those_of_lerobot_train(case):
    """Use the call and the overrides of lerobot_train.py."""
    features = {**case.config.input_features, **case.config.output_features}
    shared = {"norm_map": case.config.normalization_mapping, "stats": case.meta.stats}
    expected, expected_post = make_pre_post_processors(
        case.config,
        pretrained_path=str(case.folder),
        preprocessor_overrides={
            "device_processor": {"device": "cpu"},
            "normalizer_processor": {"features": features, **shared},
            "rename_observations_processor": {"rename_map": {}},
        },
        postprocessor_overrides={"unnormalizer_processor": {"features": case.config.output_features, **shared}},
    )
    for folder in (case.folder, str(case.folder), None):
        actual, found_post = make_processors(folder, case.config, case.meta.stats)
        assert actual.get_config() == expected.get_config()
        assert found_post.get_config() == expected_post.get_config()
        for key, state in expected.state_dict().items():
            assert all(torch.equal(actual.state_dict()[key][name], value) for name, value in state.items())


def test_required_stats_follow_normalisation_mode(case):
    features = {**case.config.input_features, **case.config.output_features}
    config = PreTrainedConfig.from_pretrained(case.folder, cli_overrides=["--device=cpu"])
    config.normalization_mapping = {"VISUAL": "IDENTITY", "STATE": "MIN_MAX", "ACTION": "QUANTILES"}
    assert required_stats(config, features) == {"observation.state": {"min", "max"}, "action": {"q01", "q99"}}


def copy_with(case, tmp_path, change):
    folder = tmp_path / "policy"
    shutil.copytree(case.folder, folder)
    file = folder / "policy_preprocessor.json"
    description = json.loads(file.read_text())
    change(description["steps"])
    file.write_text(json.dumps(description))
    return folder


def test_pipeline_that_names_python_code_is_refused(case, tmp_path):
    victim = tmp_path / "victim"
    step = {"class": "os.makedirs", "config": {"name": str(victim)}}
    folder = copy_with(case, tmp_path, lambda steps: steps.insert(0, step))
    with pytest.raises(ValueError, match="registered by name.*refused"):
        make_processors(folder, case.config, case.meta.stats)
    assert not victim.exists()
    # LeRobot itself calls it.
    with contextlib.suppress(Exception):
        make_pre_post_processors(case.config, pretrained_path=str(folder))
    assert victim.exists()


def test_tokenizer_with_remote_code_is_refused(case, tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    folder = copy_with(case, tmp_path, lambda steps: steps.append({"registry_name": "tokenizer_processor"}))
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer/evil.py").write_text(f"import os\nos.makedirs({str(victim)!r})\nclass Evil: pass\n")
    description = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps(description))
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # confirm the prompt of transformers
    with pytest.raises(ValueError, match="only be loaded by code that comes with it, which is not run"):
        make_processors(folder, case.config, case.meta.stats)
    assert not victim.exists()
    with contextlib.suppress(Exception), remote_code(trusted=True):
        AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert victim.exists()


def test_pipeline_without_normaliser_or_postprocessor_is_refused(case, tmp_path):
    def drop(steps):
        steps[:] = [step for step in steps if step["registry_name"] != "normalizer_processor"]

    folder = copy_with(case, tmp_path, drop)
    with pytest.raises(ValueError, match="cannot be built.*normalizer_processor"):
        make_processors(folder, case.config, case.meta.stats)
    (folder / "policy_postprocessor.json").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"has no policy_postprocessor.json.*both.*migrate_policy_normalization"
    ):
        make_processors(folder, case.config, case.meta.stats)


def test_processors_saved_on_another_device_load(case, tmp_path):
    def move(steps):
        next(step for step in steps if step["registry_name"] == "device_processor")["config"]["device"] = "xpu"

    folder = copy_with(case, tmp_path, move)
    with pytest.raises(ValueError, match="xpu"):
        make_pre_post_processors(case.config, pretrained_path=str(folder))
    preprocessor, _ = load_processors(folder, case.config)
    assert "cpu" in [getattr(step, "device", None) for step in preprocessor.steps]


def test_gated_tokenizer_error_names_remedy(case, monkeypatch):
    """One request to the Hub; LeRobot and transformers would retry for a minute."""
    requests = []

    def refuse(api, repo_id):
        requests.append(repo_id)
        response = httpx.Response(403, request=httpx.Request("GET", "http://hub"))
        raise GatedRepoError("gated", response=response)

    monkeypatch.setattr("huggingface_hub.HfApi.auth_check", refuse)
    from lerobot.policies.pi05.configuration_pi05 import PI05Config

    config = PI05Config(device="cpu", chunk_size=CHUNK, n_action_steps=CHUNK)
    config.input_features, config.output_features = case.config.input_features, case.config.output_features
    message = "policy: model google/paligemma-3b-pt-224: gated.*HF_TOKEN.*or put its files into.*tokenizer/"
    with pytest.raises(ValueError, match=message):
        make_processors(None, config, case.meta.stats)
    assert requests == ["google/paligemma-3b-pt-224"]
    monkeypatch.undo()
    with pytest.raises(OSError, match="tokenizer of the 'pi05' policy: .*the Hub cannot be reached.*or put its files"):
        make_processors(None, config, case.meta.stats)


def test_hub_tokenizer_is_saved_with_policy_and_loaded_from_it(case, tmp_path):
    """The step has only the tokenizer's name, as in LeRobot's PI0.5."""
    make_tokenizer(["go"]).save_pretrained(tmp_path / "hub")
    preprocessor, postprocessor = make_processors(case.folder, case.config, case.meta.stats)
    step = TokenizerProcessorStep(tokenizer_name=str(tmp_path / "hub"), max_length=16)
    preprocessor.steps = [step if isinstance(old, TokenizerProcessorStep) else old for old in preprocessor.steps]
    folder = tmp_path / "policy"
    save_pretrained(TinyPI05Policy(case.config), preprocessor, postprocessor, folder)
    shutil.rmtree(tmp_path / "hub")
    reloaded, _ = make_processors(folder, case.config, case.meta.stats)
    expected = step._tokenize_text(["go 7"])["input_ids"].tolist()
    for pipeline in (reloaded, load_processors(folder, case.config)[0]):
        actual = next(step for step in pipeline.steps if isinstance(step, TokenizerProcessorStep))
        assert actual._tokenize_text(["go 7"])["input_ids"].tolist() == expected
        assert actual.get_config() == step.get_config()  # the name is preserved for LeRobot
    save_pretrained(TinyPI05Policy(case.config), reloaded, postprocessor, tmp_path / "again")

    step.tokenizer, step.tokenizer_name = step.input_tokenizer, None
    with pytest.raises(ValueError, match="could not be loaded again"):
        save_pretrained(TinyPI05Policy(case.config), preprocessor, postprocessor, tmp_path / "unnamed")
    assert not (tmp_path / "unnamed").exists()


def test_prompt_length_follows_tokenizer_max_length(case):
    config = replace(case.config, tokenizer_max_length=case.config.tokenizer_max_length + 32)
    preprocessor, _ = make_processors(case.folder, config, case.meta.stats)
    prepared, _ = split(case, preprocessor, case.rows(INDICES))
    assert prepared[TOKENS].shape[1] == config.tokenizer_max_length


def written_tokenizer(folder, **changes):
    make_tokenizer(["go to the bin"]).save_pretrained(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def test_tokenizer_that_expands_text_is_refused(tmp_path, monkeypatch):
    steps = [{"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"}] * 9
    with pytest.raises(ValueError, match="may make a text 1,000,000,000 times as long"):
        check_tokenizer(written_tokenizer(tmp_path, normalizer={"type": "Sequence", "normalizers": steps}))
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    written_tokenizer(tmp_path, normalizer=spaces)
    monkeypatch.chdir(tmp_path)
    check_tokenizer(Path("tokenizer.json"))  # a relative path is accepted


@pytest.mark.parametrize("resource", ["time", "memory"])
def test_tokenizer_that_exhausts_time_or_memory_is_refused(tmp_path, monkeypatch, case, resource):
    """No static rule finds these: the library tries them under limits."""
    monkeypatch.setattr(tokenizer_check, "MAX_CPU_S", 1)
    folder = shutil.copytree(case.folder, tmp_path / "base")
    if resource == "time":
        pattern = {"Regex": "a{0,900}a{0,900}[^a!]"}
        changes = {"pre_tokenizer": {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}}
    else:
        text = {"Sequence": {"id": "A", "type_id": 0}}
        template = {"type": "TemplateProcessing", "single": [text] * 50_000, "special_tokens": {}}
        changes = {"post_processor": template | {"pair": [text, {"Sequence": {"id": "B", "type_id": 1}}]}}
    written_tokenizer(folder / "tokenizer", **changes)
    with pytest.raises(ValueError, match="tokenizer.json: .* takes more than 1 s of CPU time or 1 GiB"):
        make_processors(folder, case.config, case.meta.stats)


class Words:
    """Stand in for a tokenizer's step: one token per known word."""

    def __init__(self, max_length, known=lambda word: True):
        self.max_length, self._known = max_length, known

    def input_tokenizer(self, text):
        return {"input_ids": [hash(word) if self._known(word) else 0 for word in text.split()]}


def test_advantage_lost_in_prompt_is_refused():
    def check(step, *instructions):
        check_prompts_differ(SimpleNamespace(steps=[step]), instructions, "the policy")

    check(Words(6), "pick the red cube", "go")
    with pytest.raises(ValueError, match="has 7 tokens, and its prompts at most 6: the advantage would be cut off"):
        check(Words(6), "go", "pick the very red cube")
    with pytest.raises(ValueError, match="whose tokenizer knows the words"):
        check(Words(9, known=lambda word: len(word) < 5), "go")
    with pytest.raises(ValueError, match="make no tokens of instructions"):
        check(object(), "go")
