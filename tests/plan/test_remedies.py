"""Errors that name the commonest cause and the command that helps, before a worker starts."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import in_process
from tests.datasets import make_dataset
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.plan.preflight import examine
from vla_finetuning.plan.resolve import resolve
from vla_finetuning.run.checkpoint import AVERAGE, OPTIMIZER, TRAINABLE, Piece, commit, write_pieces

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123456\n"
ACT = {"chunk_size": 4, "n_action_steps": 4, "dim_model": 16, "n_heads": 2, "dim_feedforward": 16}
ACT |= {"n_encoder_layers": 1, "latent_dim": 4, "pretrained_backbone_weights": "null"}


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return in_process.make_setting(tmp_path_factory.mktemp("remedies"))


@pytest.fixture
def root(setting, tmp_path):
    return shutil.copytree(setting[1], tmp_path / "dataset")


@pytest.fixture
def base(setting, tmp_path):
    return shutil.copytree(setting[2], tmp_path / "base")


def planned(setting, **changes):
    return resolve(examine(parse_args(in_process.flags(setting, **changes))).config, gpus_found=0)


def refuses(setting, message, error=(ValueError, OSError), **changes):
    with pytest.raises(error, match=message) as raised:
        planned(setting, **changes)
    return str(raised.value)


# ---- datasets -------------------------------------------------------------------------------------------------------


FILES = ["meta/info.json", "meta/tasks.parquet", "meta/stats.json", "meta/episodes", "data", "videos"]


@pytest.mark.parametrize("name", FILES)
def test_git_lfs_pointers_of_a_dataset(setting, root, name):
    path = next(p for p in [root / name, *sorted((root / name).rglob("*"))] if p.is_file())
    path.write_bytes(POINTER)
    message = refuses(setting, "Git LFS pointer", **{"dataset.root": root})
    assert "git lfs pull" in message and str(path.relative_to(root)) in message


def test_a_dataset_without_an_episode(setting, tmp_path):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    features = {"action": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]}}
    features["observation.state"] = features["action"]
    LeRobotDataset.create("local/new", fps=10, features=features, root=tmp_path / "new")
    refuses(setting, "no episode has been recorded yet.*lerobot-record", **{"dataset.root": tmp_path / "new"})


def test_a_recording_that_was_cut_off(setting, root):
    """Without `finalize`, data files have no footer and the table of episodes is not there."""
    (data,) = sorted((root / "data").rglob("*.parquet"))[:1]
    data.write_bytes(data.read_bytes()[:-40])
    message = refuses(setting, "a recording ended early", **{"dataset.root": root})
    assert data.name in message
    shutil.rmtree(root / "meta/episodes")
    refuses(setting, "LeRobotDataset.finalize.*record its episodes again", **{"dataset.root": root})


# ---- policies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "policy_preprocessor.json"])
def test_git_lfs_pointers_of_a_policy(setting, base, name):
    (base / name).write_bytes(POINTER)
    assert "git lfs pull" in refuses(setting, f"{name} is a Git LFS pointer", **{"policy.path": base})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m"}, "openpi's own.*lerobot/pi05_base"),
        ({"model_type": "paligemma", "architectures": ["X"]}, r"a model of transformers \(paligemma\)"),
        ({"state_dim": 3}, "has no `type`, but state_dim: give the pretrained_model of a run"),
        ([1], "is of no LeRobot policy"),
        ({"type": "pi06"}, "no policy is of type 'pi06'"),
        ("{", "config.json is damaged"),
    ],
)
def test_a_configuration_that_is_no_lerobot_policys(setting, base, config, message):
    (base / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    refuses(setting, message, **{"policy.path": base})


def test_fields_of_a_newer_lerobot(setting, base):
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "new_attention": "flash4", "other": 1}))
    message = "has new_attention, other, which .* does not know: it was saved by a newer"
    refuses(setting, message, **{"policy.path": base})


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_weights_of_a_wrapped_policy(setting, base, prefix, monkeypatch):
    weights = base / "model.safetensors"
    before = load_file(weights)
    save_file({f"{prefix}{name}": value for name, value in before.items()}, weights)
    message = refuses(setting, f"all begin with '{prefix}'", **{"policy.path": base})
    monkeypatch.chdir(base)
    exec(re.search(r'python -c "(.*)"', message)[1])  # the command does what it says
    assert load_file(weights).keys() == before.keys()
    planned(setting, **{"policy.path": base})


def test_weights_with_normalisation_inside(setting, base):
    weights = base / "model.safetensors"
    save_file({**load_file(weights), "normalize_inputs.buffer_observation_state.mean": torch.zeros(2)}, weights)
    refuses(setting, "lerobot.processor.migrate_policy_normalization --pretrained-path", **{"policy.path": base})


def test_a_policy_without_weights_and_one_of_adapters_alone(setting, base):
    (base / "model.safetensors").rename(base / "model.bin")
    refuses(setting, r"no model.safetensors, found \['config.json', 'model.bin'.*copy it", **{"policy.path": base})
    (base / "adapter_config.json").write_text("{}")
    refuses(setting, f"python -m diagnostics.merge_adapter {base} base_merged", **{"policy.path": base})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vision_backbone": "resnet99"}, "resnet99"),
        ({"dim_model": 15}, "cannot be built from its configuration"),
        ({"n_action_steps": 0}, "--policy.n_action_steps=0: must be positive"),
        ({"chunk_size": -1, "n_action_steps": -1}, "must be positive"),
        ({"temporal_ensemble_coeff": 0.1}, "n_action_steps. must be 1"),
    ],
)
def test_a_policy_that_lerobot_does_not_build(setting, options, message):
    changes = {f"policy.{name}": value for name, value in {**ACT, **options}.items()}
    flags = [f for f in in_process.flags(setting, **changes, **{"policy.type": "act"}) if "policy.path" not in f]
    with pytest.raises(ValueError, match=message):
        resolve(parse_args(flags), gpus_found=0)


def test_trained_weights_for_another_robot_or_another_chunk(setting, tmp_path):
    """Of ACT, whose weights no family compares: before a worker starts."""
    from lerobot.policies.act.modeling_act import ACTPolicy

    options = {f"policy.{name}": value for name, value in ACT.items()}
    flags = [f for f in in_process.flags(setting, **options, **{"policy.type": "act"}) if "policy.path" not in f]
    run = resolve(parse_args(flags), gpus_found=0)
    run.policy.config.device = "cpu"
    ACTPolicy(run.policy.config).save_pretrained(tmp_path / "act")
    for processor, name in zip(run.policy.processors(), ("policy_preprocessor", "policy_postprocessor"), strict=True):
        processor.save_pretrained(tmp_path / "act", config_filename=f"{name}.json")
    planned(setting, **{"policy.path": tmp_path / "act"})
    other = make_dataset(tmp_path / "other", episodes=(6, 5), state_dim=7, action_dim=5)
    refuses(setting, "of another shape", **{"policy.path": tmp_path / "act", "dataset.root": other})
    longer = {"policy.path": tmp_path / "act", "policy.chunk_size": 6, "policy.n_action_steps": 6}
    refuses(setting, "of another shape: .*model.decoder_pos_embed", **longer)


# ---- runs that go on ------------------------------------------------------------------------------------------------


def test_a_resumed_run_with_another_optimizer_or_an_average(setting, tmp_path):
    run = planned(setting, output_dir=tmp_path / "run")
    folder = run.job.checkpoints_dir / "step_00000001"
    folder.parent.mkdir(parents=True)
    state = {f"{kind}.a": Piece(torch.zeros(2), (0,)) for kind in ("exp_avg", "exp_avg_sq", "step")}
    pieces = {TRAINABLE: {"a": Piece(torch.zeros(2), (0,))}, OPTIMIZER: state}
    commit(folder, replace(run.job.start, step=1), write_pieces(folder, pieces), 0)
    (tmp_path / "run/config.json").write_text(json.dumps(run.config.to_json()))
    argv = [f"--output_dir={tmp_path / 'run'}", "--resume"]
    resolve(parse_args(argv), gpus_found=0)
    with pytest.raises(ValueError, match="--ema.enable: .* was written without an average"):
        resolve(parse_args([*argv, "--ema.enable=true"]), gpus_found=0)
    with pytest.raises(ValueError, match="--optimizer.type=muon: .* has the state of another optimizer"):
        resolve(parse_args([*argv, "--optimizer.type=muon"]), gpus_found=0)
    assert AVERAGE not in pieces


def test_lerobots_way_to_resume(tmp_path):
    saved = {"policy": {"type": "act"}, "dataset": {"repo_id": "a/b"}, "wandb": {}, "steps": 9}
    (tmp_path / "train_config.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="of lerobot-train, whose --config_path .* --output_dir FOLDER --resume"):
        parse_args([f"--config_path={tmp_path / 'train_config.json'}"])


def test_a_base_is_proposed_to_be_left_out_only_where_there_is_such_an_option(setting):
    flags = [f for f in in_process.flags(setting, **{"policy.type": "act"}) if "policy.path" not in f]
    with pytest.raises(ValueError, match="give them with --policy.path$"):
        resolve(parse_args([*flags, "--policy.pretrained_path=somewhere/else"]), gpus_found=0)
