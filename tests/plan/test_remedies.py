"""The printed plan, and errors with their remedies before a worker starts."""

import json
import math
import re
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import vla
from tests import in_process
from tests.datasets import edit_json, make_dataset
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.plan.preflight import examine
from vla_finetuning.plan.resolve import resolve
from vla_finetuning.run import cluster
from vla_finetuning.run.checkpoint import AVERAGE, OPTIMIZER, TRAINABLE, Piece, commit, write_pieces
from vla_finetuning.run.folder import LOG_NAME
from vla_finetuning.training import plan as training_plan

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123456\n"
ACT = {"chunk_size": 4, "n_action_steps": 4, "dim_model": 16, "n_heads": 2, "dim_feedforward": 16}
ACT |= {"n_encoder_layers": 1, "latent_dim": 4, "pretrained_backbone_weights": "null"}
FRESH_ACT = {"policy.path": None, "policy.type": "act"}
TOP, WRIST = (f"observation.images.{name}" for name in ("top", "wrist"))


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


def dry_run(setting, capsys, monkeypatch, *more, **changes):
    """Run the program without Ray. Return its status and its output with single blanks."""
    monkeypatch.setattr(cluster, "start", None)
    status = vla.main([*in_process.flags(setting, **changes), "--dry_run", *more])
    assert not (setting[0] / "run").exists()
    return status, re.sub(" +", " ", "".join(capsys.readouterr()))


def test_dry_run_prints_plan_without_side_effects(setting, capsys, monkeypatch):
    folder, root, base = setting
    status, text = dry_run(setting, capsys, monkeypatch)
    parameters = sum(parameter.numel() for parameter in load_file(base / "model.safetensors").values())
    for line in (
        f"Dataset {root}",
        "3 episodes, 15 frames at 10 fps, robot test_arm",
        "trains on 3 episodes, 15 frames; 0 held out",
        "2 tasks: 'go to the red bin'; 'go to the blue bin'",
        f"camera {WRIST} 96x80x3 video",
        f"Policy tiny_pi05, {base}",
        f"{parameters:,} parameters",
        f"{TOP} 48x64x3 -> {TOP} 3x48x64 IDENTITY",
        "action 3 -> action 3 QUANTILES",
        "Batch 2 rows x 2 micro-steps x 1 workers = 4 per step",
        "Steps 3 (0.80 epochs of 15 rows, 3.8 steps each); a line every 50",
        f"Checkpoints every 1000 steps and at the end, keeping the last 2, in {folder / 'run'}",
    ):
        assert line in text, line
    assert status == 0


def test_dry_run_checks_tracker_and_hub_token(setting, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for flag, message in (("--track=wandb", "--track wandb"), ("--policy.repo_id=me/a", "model me/a: no token")):
        status, text = dry_run(setting, capsys, monkeypatch, flag)
        assert status == 2 and f"error: {message}" in text


@pytest.mark.parametrize("name", ["meta/info.json", "data", "videos"])
def test_git_lfs_pointers_in_dataset_are_refused(setting, root, name):
    path = next(p for p in [root / name, *sorted((root / name).rglob("*"))] if p.is_file())
    path.write_bytes(POINTER)
    message = refuses(setting, "Git LFS pointer", **{"dataset.root": root})
    assert "git lfs pull" in message and str(path.relative_to(root)) in message


def test_dataset_without_episodes_is_refused(setting, root, tmp_path):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    features = {"action": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]}}
    features["observation.state"] = features["action"]
    LeRobotDataset.create("local/new", fps=10, features=features, root=tmp_path / "new")
    refuses(setting, "no episode has been recorded yet.*lerobot-record", **{"dataset.root": tmp_path / "new"})
    # As a recording that was not finalized.
    shutil.rmtree(root / "meta/episodes")
    refuses(setting, "LeRobotDataset.finalize.*record its episodes again", **{"dataset.root": root})


def test_missing_or_infinite_camera_statistics_are_refused(setting, root):
    message = rf"dataset {root}: .*lacks \['mean', 'std'\] of {TOP}.*augment_dataset_quantile_stats"
    options = {**FRESH_ACT, "dataset.root": root, "dataset.use_imagenet_stats": "false"}
    edit_json(root / "meta/stats.json", lambda stats: stats[TOP]["std"].__setitem__(0, [[math.inf]]))
    refuses(setting, rf"'std' of '{TOP}' is not finite", **options, **{"dataset.statistics": "exact"})
    (root / "meta/stats.json").unlink()
    refuses(setting, message, **options)


def test_datasets_with_different_fps_are_refused(setting, root):
    edit_json(root / "meta/info.json", lambda info: info.update(fps=5))
    refuses(setting, f"{setting[1]} has 10 fps, {root} has 5 fps", **{"dataset.root": f"{setting[1]},{root}"})


def test_batch_larger_than_dataset_is_refused(setting):
    message = refuses(setting, "a global batch of 56 rows", batch_size=14, **{"scaling.num_workers": 2})
    assert "(batch_size 14 x grad_accum 2 x 2 workers) is more than the 15 training frames" in message
    assert "lower --batch_size or --grad_accum" in message


def test_pretrained_path_without_policy_path_is_refused(setting):
    refuses(
        setting,
        "weights of somewhere/else: give them with --policy.path",
        **FRESH_ACT,
        **{"policy.pretrained_path": "somewhere/else"},
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("chunk_sise", "8", "chunk_sise: no option of TinyPI05Config; did you mean --policy.chunk_size"),
        ("chunk_size", "many", "chunk_size=many: .*Couldn't parse 'many' into an int"),
        ("n_action_steps", "99", r"n_action_steps=99.*: .*cannot be greater than chunk_size \(\d+\)"),
        # What LeRobot's parser would take for its own: each would open a file.
        ("config_path", "/etc/hostname", "config_path: no option of TinyPI05Config"),
        ("rtc_config", "include /etc/hostname", "rtc_config=include /etc/hostname: .*"),
        ("rtc_config.config_path", "/etc/hostname", "rtc_config.config_path: no option of Tiny"),
        ("chunk_size.a", "1", "chunk_size.a: no option of TinyPI05Config; it is one value"),
    ],
)
def test_invalid_policy_options_are_refused_by_name(setting, name, value, message):
    refuses(setting, rf"policy {setting[2]}: .*--policy.{message}", **{f"policy.{name}": value})


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "policy_preprocessor.json"])
def test_git_lfs_pointers_in_policy_are_refused(setting, base, name):
    (base / name).write_bytes(POINTER)
    assert "git lfs pull" in refuses(setting, f"{name} is a Git LFS pointer", **{"policy.path": base})
    if name == "policy_preprocessor.json":
        (base / name).write_text("{")
        refuses(setting, f"{base}/policy_preprocessor.json is no pipeline", **{"policy.path": base})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"paligemma_variant": "gemma_2b"}, "but paligemma_variant: .*lerobot/pi05_base; weights of openpi have to be"),
        ({"state_dim": 3}, "has no `type`, but state_dim: give the pretrained_model of a run"),
        ([1], "is of no LeRobot policy"),
        ({"type": "pi06"}, "no policy is of type 'pi06'"),
        ("{", "config.json is damaged"),
        ({"type": "tiny_pi05", "new_attention": "flash4"}, "has new_attention, which .* it was saved by a newer"),
    ],
)
def test_config_of_no_lerobot_policy_is_refused(setting, base, config, message):
    (base / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    refuses(setting, message, **{"policy.path": base})


def test_weights_with_other_names_or_nan_are_refused(setting, base):
    weights = base / "model.safetensors"
    saved = load_file(weights)
    save_file({f"module.{name}": value for name, value in saved.items()}, weights)
    refuses(setting, r"missing: model\..* unexpected: model\.module\.", **{"policy.path": base})
    save_file({**saved, "normalize_inputs.buffer_observation_state.mean": torch.zeros(2)}, weights)
    refuses(setting, "lerobot.processor.migrate_policy_normalization --pretrained-path", **{"policy.path": base})
    saved["model.action_in_proj.weight"][0, 0] = torch.nan
    save_file(saved, weights)
    refuses(setting, "model.action_in_proj.weight in .* not finite, 1 of", **{"policy.path": base})


def test_policy_without_weights_or_with_adapters_alone_is_refused(setting, base):
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
        ({"temporal_ensemble_coeff": 0.1}, "n_action_steps. must be 1"),
    ],
)
def test_options_that_lerobot_rejects_are_refused(setting, options, message):
    changes = {f"policy.{name}": value for name, value in {**ACT, **options}.items()}
    refuses(setting, message, **changes, **FRESH_ACT)


def test_weights_of_other_shapes_are_refused_at_plan_time(setting, tmp_path):
    from lerobot.policies.act.modeling_act import ACTPolicy

    options = {f"policy.{name}": value for name, value in ACT.items()}
    run = planned(setting, **options, **FRESH_ACT)
    run.policy.config.device = "cpu"
    ACTPolicy(run.policy.config).save_pretrained(tmp_path / "act")
    for processor, name in zip(run.policy.processors(), ("policy_preprocessor", "policy_postprocessor"), strict=True):
        processor.save_pretrained(tmp_path / "act", config_filename=f"{name}.json")
    planned(setting, **{"policy.path": tmp_path / "act"})
    wider = make_dataset(tmp_path / "other", episodes=(6, 5), state_dim=7, action_dim=5)
    refuses(setting, "of another shape", **{"policy.path": tmp_path / "act", "dataset.root": wider})
    longer = {"policy.path": tmp_path / "act", "policy.chunk_size": 6, "policy.n_action_steps": 6}
    refuses(setting, "of another shape: .*model.decoder_pos_embed", **longer)


def test_resume_with_other_optimizer_or_new_ema_is_refused(setting, tmp_path):
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
    with pytest.raises(ValueError, match="--optimizer.type=sgd: .* has the state of another optimizer"):
        resolve(parse_args([*argv, "--optimizer.type=sgd"]), gpus_found=0)
    assert AVERAGE not in pieces


@pytest.mark.ray
@pytest.mark.faults
@pytest.mark.slow  # what the read task says: tests/data/test_damaged_files.py
def test_video_truncated_after_check_ends_run_once_with_remedy(
    setting, ray_cluster, root, tmp_path, capsys, monkeypatch
):
    meta, output_dir = load_metadata(root), tmp_path / "out"
    file = meta.video_files[TOP][0]

    def cut_off(*_):
        (root / file).write_bytes((root / file).read_bytes()[: (root / file).stat().st_size // 2])
        return []

    monkeypatch.setattr(training_plan, "look_at_rows", cut_off)
    assert vla.main(in_process.flags(setting, **{"dataset.root": root, "output_dir": output_dir})) == 1
    assert not (output_dir / "pretrained_model").exists()
    assert (output_dir / LOG_NAME).read_text().count(" failed on rank ") == 1
    *_, message = capsys.readouterr().err.strip().splitlines()
    reported = re.search(rf"^error: {root}: {file} \(camera {TOP}, episodes? \[?(\d+)", message)
    assert int(reported[1]) in np.flatnonzero(meta.episode_video_file[TOP] == 0)
    assert "truncated" in message and "copy it again" in message
    assert not re.search(r"Traceback|ray::|RayTaskError|UserCode|UDF|attempts|\.py", message)
