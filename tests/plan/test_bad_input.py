"""What the program says to bad input: `vla.main` refuses it before Ray starts, naming what, where and what to do."""

import json
import re
import shlex
import shutil
import sys

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file, save_file

import vla
from tests.datasets import make_dataset
from tests.tiny import make_base
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.plan.resolve import resolve, with_stats
from vla_finetuning.run.folder import LOG_NAME
from vla_finetuning.training.model import build_model

TOP, WRIST, SIDE = (f"observation.images.{name}" for name in ("top", "wrist", "side"))
FRAMES = 54


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bad_input")


@pytest.fixture(scope="module")
def root(folder):
    """A sound dataset: six episodes, cameras `top` and `wrist`, several files of each kind."""
    return make_dataset(folder / "dataset")


@pytest.fixture(scope="module")
def base(folder, root):
    return changed_base(folder / "base", root, lambda features: features)


def changed_base(folder, root, change):
    """A tiny PI0.5 for the dataset's features after `change`."""
    meta = load_metadata(root)
    return make_base(
        folder, meta, features=change(dict(meta.features)), chunk_size=4, width=32, depth=2, vision_width=32
    )


@pytest.fixture
def copy(root, tmp_path):
    return shutil.copytree(root, tmp_path / "copy")


@pytest.fixture
def base_copy(base, tmp_path):
    return shutil.copytree(base, tmp_path / "base_copy")


@pytest.fixture
def run(root, base, tmp_path, capsys, monkeypatch):
    """Run the program where Ray must not start: `run(**{"dataset.root": ...})` gives (status, stdout, stderr)."""

    def refuse(run):
        raise AssertionError("Ray was started")

    monkeypatch.setattr(vla.cluster, "start", refuse)

    def go(*more, **changes):
        before = ray.is_initialized()
        status = vla.main([*flags(root, base, tmp_path / "out", **changes), *more])
        assert ray.is_initialized() == before
        out, err = capsys.readouterr()
        return status, out, err

    return go


def flags(root, base, output_dir, **changes):
    """A good command line, changed; None takes a flag away."""
    options = {
        "dataset.root": root,
        "policy.path": base,
        "output_dir": output_dir,
        "steps": 4,
        "batch_size": 4,
        "log_freq": 1,
        "save_freq": 2,
        "scaling.cpus_per_worker": 0.5,
        **changes,
    }
    return [f"--{key}={value}" for key, value in options.items() if value is not None]


@pytest.fixture
def refused(run, tmp_path):
    """Run the program, which must refuse; gives the message."""

    def go(*more, **changes):
        status, _, err = run(*more, **changes)
        assert status == 2
        assert err.startswith("error: ") and "Traceback" not in err
        assert not (tmp_path / "out").exists()
        return err

    return go


def plan(run, *more, **changes):
    """What --dry_run prints, with the runs of blanks in it shortened."""
    status, out, err = run(*more, "--dry_run", **changes)
    assert (status, err) == (0, "")
    return re.sub(" +", " ", out)


def edit_info(root, **changes):
    path = root / "meta/info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# ---- the plan of a good run ----------------------------------------------------------------------------------------


def test_a_dry_run_prints_the_plan_and_does_nothing(run, root, base, tmp_path):
    text = plan(run, **{"grad_accum": 2, "dataset.eval_split": 0.1})
    trained = sum(parameter.numel() for parameter in load_file(base / "model.safetensors").values())
    for line in (
        f"Dataset {root}",
        f"6 episodes, {FRAMES} frames at 10 fps, robot test_arm",
        "trains on 4 episodes, 35 frames; 2 held out",
        "2 tasks: 'go to the red bin'; 'go to the blue bin'",
        f"camera {TOP} 48x64x3 video",
        f"camera {WRIST} 96x80x3 video",
        "Statistics those in meta/stats.json",
        "looked at 35 rows of 4 of the 4 training episodes",
        f"Policy tiny_pi05, {base}",
        f"{trained:,} parameters",
        f"{TOP} 48x64x3 -> {TOP} 3x48x64 IDENTITY",
        "observation.state 4 -> observation.state 4 QUANTILES",
        "action 3 -> action 3 QUANTILES",
        "Batch 4 rows x 2 micro-steps x 1 workers = 8 per step",
        "Steps 4 (0.91 epochs of 35 rows, 4.4 steps each); a line every 1",
        f"Checkpoints every 2 steps and at the end, keeping the last 2, in {tmp_path / 'out'}",
    ):
        assert line in text
    assert not (tmp_path / "out").exists()


def test_the_plan_counts_what_trains(run):
    def trained(mode):
        found = re.search(r"([\d,]+) parameters, ([\d,]+) of them train", plan(run, **{"train.mode": mode}))
        return [int(number.replace(",", "")) for number in found.groups()]

    (total, heads), (_, expert), (_, full) = map(trained, ("heads", "expert", "full"))
    assert 0 < heads < expert < full < total


# ---- the dataset ---------------------------------------------------------------------------------------------------


def test_statistics_of_cameras_are_not_computed(refused, copy):
    (copy / "meta/stats.json").unlink()
    flags = {"policy.path": None, "policy.type": "act", "train.mode": "full", "dataset.use_imagenet_stats": "false"}
    message = refused(**{"dataset.root": copy, **flags})
    assert re.search(rf"dataset {copy}: .*lacks \['mean', 'std'\] of {TOP}.*augment_dataset_quantile_stats", message)


def test_datasets_of_different_frame_rates(refused, root, copy):
    edit_info(copy, fps=5)
    message = refused(**{"dataset.root": f"{root},{copy}"})
    assert f"{root} has 10 fps, {copy} has 5 fps" in message


def test_a_batch_larger_than_the_dataset(refused):
    message = refused(batch_size=14, grad_accum=2, **{"scaling.num_workers": 2})
    assert "a global batch of 56 rows (batch_size 14 x grad_accum 2 x 2 workers)" in message
    assert f"more than the {FRAMES} training frames" in message and "lower --batch_size or --grad_accum" in message


# ---- the policy and the dataset ------------------------------------------------------------------------------------


def renamed(names):
    return lambda features: {names.get(key, key): feature for key, feature in features.items()}


def test_cameras_of_other_names_and_the_rename_map_to_write(refused, run, root, tmp_path):
    names = {TOP: "observation.images.top_rgb", WRIST: "observation.images.left_wrist"}
    other = changed_base(tmp_path / "base", root, renamed(names))
    message = refused(**{"policy.path": other})
    assert f"dataset {root} and policy {other}: the policy has cameras that the dataset lacks" in message
    (flag,) = shlex.split(re.search(r"same cameras, (--rename_map='.*?')", message)[1])
    text = plan(run, flag, **{"policy.path": other})
    assert f"{TOP} 48x64x3 -> {names[TOP]} 3x48x64" in text
    assert f"{WRIST} 96x80x3 -> {names[WRIST]} 3x96x80" in text


def test_a_camera_that_the_dataset_lacks(refused, run, root, tmp_path):
    other = changed_base(tmp_path / "base", root, lambda features: {**features, SIDE: features[TOP]})
    message = refused(**{"policy.path": other})
    assert f"policy {other}: the policy has cameras that the dataset lacks: ['{SIDE}']" in message
    flag = "--dataset.missing_cameras=mask"
    assert flag in message
    assert f"(no camera) masked -> {SIDE}" in plan(run, flag, **{"policy.path": other})


def test_a_camera_that_the_policy_does_not_know(refused, run, root, tmp_path):
    other = changed_base(tmp_path / "base", root, lambda features: {k: f for k, f in features.items() if k != WRIST})
    message = refused(**{"policy.path": other})
    assert f"the dataset has cameras that the policy does not know: ['{WRIST}']" in message
    assert "--dataset.camera_keys" in message
    chosen = {"policy.path": other, "dataset.camera_keys": json.dumps([TOP])}
    assert f"camera {WRIST} 96x80x3 video (not used)" in plan(run, **chosen)
    # A shell takes the quotation marks away that JSON needs.
    message = refused(**{**chosen, "dataset.camera_keys": f"[{TOP}]"})
    assert f"--dataset.camera_keys=[{TOP}]: expected dataset keys, as observation.images.top,obs" in message


# ---- the policy ----------------------------------------------------------------------------------------------------


def test_no_such_policy(refused, tmp_path):
    assert f"{tmp_path / 'x'} is no folder and no Hub id" in refused(**{"policy.path": tmp_path / "x"})
    assert "model lerobot/pi05_base: the Hub cannot be reached" in refused(**{"policy.path": "lerobot/pi05_base"})
    assert "no policy is of type 'pi06'; LeRobot knows act, " in refused(**{"policy.path": None, "policy.type": "pi06"})


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--policy.chunk_sise=8", "--policy.chunk_sise: no option of TinyPI05Config; did you mean --policy.chunk_size"),
        ("--policy.chunk_size=many", "--policy.chunk_size=many: .*Couldn't parse 'many' into an int"),
        ("--policy.n_action_steps=9", r"--policy.n_action_steps=9.*: .*cannot be greater than chunk_size \(4\)"),
        # What LeRobot's parser would take for its own: each would open a file.
        ("--policy.config_path=/etc/hostname", "--policy.config_path: no option of TinyPI05Config"),
        ("--policy.rtc_config=include /etc/hostname", "--policy.rtc_config=include /etc/hostname: .*"),
        ("--policy.rtc_config.config_path=/etc/hostname", "--policy.rtc_config.config_path: no option of Tiny"),
        ("--policy.chunk_size.a=1", "--policy.chunk_size.a: no option of TinyPI05Config; it is one value"),
    ],
)
def test_options_that_the_policy_does_not_take(refused, base, option, message):
    assert re.search(rf"policy {base}: .*{message}", refused(option))


def test_a_damaged_processor(refused, base_copy):
    (base_copy / "policy_preprocessor.json").write_text("{")
    assert f"{base_copy}/policy_preprocessor.json is no pipeline" in refused(**{"policy.path": base_copy})


def test_parts_of_pi05_in_another_policy(refused):
    message = refused(**{"policy.path": None, "policy.type": "act"})
    assert "--train.mode=expert names parts of pi0, pi05, smolvla" in message
    assert "and the policy is of type act; use --train.mode=full" in message


# ---- the run's folder ----------------------------------------------------------------------------------------------


# ---- what only Ray can tell ----------------------------------------------------------------------------------------


def failed(root, base, output_dir, capsys, **changes):
    """Run the program for real; it must fail cleanly, and try nothing twice. Gives what it says."""
    assert vla.main(flags(root, base, output_dir, **changes)) == 1
    assert not (output_dir / "pretrained_model").exists()
    assert (output_dir / LOG_NAME).read_text().count(" failed on rank ") == 1
    *warnings, message = capsys.readouterr().err.strip().splitlines()
    assert message.startswith("error: ")
    assert not re.search(r"Traceback|ray::|RayTaskError|UserCode|UDF|attempts|\.py", message)
    return message


@pytest.mark.ray
@pytest.mark.faults
@pytest.mark.slow  # what the read task says: tests/data/test_datasource.py
def test_a_truncated_mp4(ray_cluster, copy, base, tmp_path, capsys):
    meta = load_metadata(copy)
    file = meta.video_files[TOP][0]
    (copy / file).write_bytes((copy / file).read_bytes()[: (copy / file).stat().st_size // 2])
    message = failed(copy, base, tmp_path / "out", capsys)
    found = re.search(rf"error: {copy}: {file} \(camera {TOP}, episodes? \[?(\d+)", message)
    assert int(found[1]) in np.flatnonzero(meta.episode_video_file[TOP] == 0)
    assert "truncated" in message and "copy it again" in message


def not_a_number(file):
    weights = load_file(file)
    weights["model.action_in_proj.weight"][0, 0] = torch.nan
    save_file(weights, file)


def test_weights_that_are_not_finite(root, base_copy, tmp_path):
    """By the driver, and by workers of a base that was damaged meanwhile."""
    run = resolve(parse_args(flags(root, base_copy, tmp_path / "out")), gpus_found=0)
    not_a_number(base_copy / "model.safetensors")
    message = f"model.action_in_proj.weight in {base_copy} holds values that are not finite"
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve(parse_args(flags(root, base_copy, tmp_path / "out")), gpus_found=0)
    with pytest.raises(ValueError, match=re.escape(message)):
        build_model(run.policy, torch.device("cpu"))


@pytest.mark.ray
def test_statistics_that_one_of_two_datasets_lacks(ray_cluster, root, base, folder, tmp_path):
    """With "lerobot" they are computed, and both datasets count, as in LeRobot's merged datasets."""
    from lerobot.datasets.compute_stats import aggregate_stats

    second = make_dataset(tmp_path / "second", episodes=(5, 8), seed=1, true_quantiles=False)
    expected = aggregate_stats([load_metadata(root).stats, load_metadata(second).stats])
    (second / "meta/stats.json").unlink()
    changes = {"dataset.root": f"{root},{second}", "dataset.statistics": "lerobot"}
    resolved = resolve(parse_args(flags(root, base, tmp_path / "out", **changes)), gpus_found=0)
    assert resolved.robots[0].missing_stats.keys() == {"observation.state", "action"}
    completed = with_stats(resolved)
    assert not completed.robots[0].missing_stats
    for key in ("observation.state", "action"):
        for name in ("q01", "q99"):
            np.testing.assert_allclose(completed.robots[0].stats[key][name], expected[key][name], rtol=1e-6)


def test_a_dry_run_looks_at_tracker_and_hub(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "--track wandb" in refused("--dry_run", track="wandb")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert "model me/pick: no token to push with" in refused("--dry_run", **{"policy.repo_id": "me/pick"})
