"""Errors and finished runs are recognized before PyTorch, LeRobot and Ray are imported."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock

import vla
from tests import in_process
from tests.datasets import edit_json, make_dataset
from tests.tiny import make_base
from vla_finetuning.buckets.mirror import remove
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.files import write_json
from vla_finetuning.options.command_line import parse_args, parse_grpo, parse_value
from vla_finetuning.options.job import CONFIG_NAME
from vla_finetuning.options.programs import GrpoConfig
from vla_finetuning.plan.describe import describe
from vla_finetuning.plan.paths import with_absolute_paths
from vla_finetuning.plan.preflight import examine
from vla_finetuning.run.checkpoint import SPARE_BYTES, TRAINABLE, Piece, Progress, commit, write_pieces
from vla_finetuning.run.exported import result_problem
from vla_finetuning.run.folder import (
    FINISHED_NAME,
    LOCK_NAME,
    checkpoint_written,
    finish,
    own_folder,
    prepare_folder,
)
from vla_finetuning.training.state import begin
from vla_finetuning.training.worker import Worker

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "ray", "lerobot", "transformers"}
# Answered before any package is imported: the exit status and a part of what is printed.
ANSWERS = {
    "vla.py --stepz 3": (2, "unknown flag --stepz"),
    "grpo.py --policy.path=/p --seed ten": (2, "--seed=ten"),
    "evaluate.py --help": (0, "usage: python evaluate.py"),
    "vla.py --help": (0, "usage: python vla.py"),
}


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preflight")
    root = make_dataset(folder / "dataset", cameras={"observation.images.top": (48, 64)})
    return folder, root, make_base(folder / "base", load_metadata(root), chunk_size=8)


# Four rows a step.
flags = partial(in_process.flags, batch_size=4, grad_accum=1, steps=5)
run_of = partial(in_process.resolved, batch_size=4, grad_accum=1, steps=5)


def started(setting, folder, **changes):
    """Start a run and commit a checkpoint of step 2."""
    run = run_of(setting, output_dir=folder, **changes)
    with own_folder(run.config, run.job.start, run.job.steps, run.job.disk_bytes):
        prepare_folder(run.config)
        step = run.job.checkpoints_dir / "step_00000002"
        commit(step, replace(run.job.start, step=2, rows=8), write_pieces(step, {}), 0)
        checkpoint_written(folder, 2, 0)
    return run


@pytest.fixture
def finished(setting, tmp_path):
    """Return a finished run and its exported policy."""
    run = started(setting, tmp_path / "run")
    finish(run.job.output_dir, run.job.steps)
    return run, Path(shutil.copytree(setting[2], tmp_path / "run" / "pretrained_model"))


def pieces_of(size):
    """Return the pieces of a tensor of `size` bytes."""
    return {"a": Piece(torch.zeros(size, dtype=torch.uint8), (0,))}


def checked(config, *args):
    """Check as a dry run does: nothing is locked or changed."""
    with own_folder(replace(config, dry_run=True), *args):
        pass


def occupied(setting, folder):
    folder.mkdir()
    (folder / "meta").write_text("a dataset's own")
    return flags(setting, output_dir=folder)


def going_on(setting, folder):
    started(setting, folder)
    return [*flags(setting, output_dir=folder), "--resume"]


def unwritable(setting, folder):
    (folder.parent / "file").write_text("")
    return flags(setting, output_dir=folder.parent / "file" / "run")


def a_camera(setting, folder):
    return flags(setting, **{"output_dir": folder, "dataset.camera_keys": "observation.images.topp"})


def no_dataset(setting, folder):
    return flags(setting, output_dir=folder, **{"dataset.root": folder})


def lance(setting, folder):
    root = shutil.copytree(setting[1], folder.parent / "lance")
    edit_json(root / "meta/info.json", lambda info: info.update(storage_format="lance"))
    return flags(setting, output_dir=folder, **{"dataset.root": root})


CASES = {
    occupied: "is not empty: it holds no run; choose another",
    going_on: "a run is going on there",
    unwritable: "is a file; choose another folder",
    a_camera: "'observation.images.topp', but observation.images.top; did you mean observation.images.top?",
    no_dataset: "no such folder",
    lance: "Lance",
}
RUNS = """
import contextlib, io, json, runpy, sys
for argv in json.loads(sys.argv[1]):
    sys.argv, printed = argv, io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as ended:
        print(json.dumps([ended.code, printed.getvalue(), *{name.partition(".")[0] for name in sys.modules}]))
"""


def test_early_errors_need_no_heavy_imports(setting, tmp_path):
    """Run all commands in one process."""
    commands = [command.split() for command in ANSWERS]
    for case in CASES:
        (tmp_path / case.__name__).mkdir()
        commands.append(["vla.py", *case(setting, tmp_path / case.__name__ / "run"), "--dry_run"])
    with FileLock(tmp_path / "going_on" / "run" / LOCK_NAME):
        command = [sys.executable, "-c", RUNS, json.dumps(commands)]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    expected = [*ANSWERS.values(), *((2, message) for message in CASES.values())]
    for number, (line, (status, message)) in enumerate(zip(ran.stdout.splitlines(), expected, strict=True)):
        code, printed, *loaded = json.loads(line)
        heavy = HEAVY | {"draccus", "numpy", "pandas", "pyarrow"} if number < len(ANSWERS) else HEAVY
        assert code == status and message in printed and not heavy & set(loaded), commands[number]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 3}, "a step has 3 rows, but the run was started with 4"),
        ({"steps": 1}, "2 steps are done, and --steps, --num_epochs or MAX_TRAIN_STEPS says 1"),
        ({}, r"no space for the checkpoints \(--keep_checkpoints, "),
    ],
    ids=["batch", "steps", "disk"],
)
def test_dry_run_and_start_refuse_alike_and_change_nothing(setting, tmp_path, monkeypatch, capsys, changes, message):
    started(setting, tmp_path / "run")
    if not changes:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    argv = [f"--{name}={value}" for name, value in {"output_dir": tmp_path / "run", **changes}.items()]
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*"))
    for more in (["--dry_run"], []):
        assert vla.main([*argv, "--resume", *more]) == 2
        out, err = capsys.readouterr()
        assert re.search(message, err)
        assert "Dataset" not in out, "the plan is printed first"
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*")) == before


def test_disk_check_counts_peak_number_of_checkpoints(setting, tmp_path, monkeypatch):
    """Old checkpoints go after the next is written; present ones of a resumed run need no space."""
    run = run_of(setting, output_dir=tmp_path / "run", steps=100, save_freq=1)
    checkpoint_size, weights = run.policy.checkpoint_bytes, (Path(setting[2]) / "model.safetensors").stat().st_size
    assert run.job.disk_bytes == 3 * checkpoint_size + weights
    for changes, most in (
        ({"keep_checkpoints": 10, "keep_best": 2}, 13),
        ({"export": "best"}, 4),
        ({"keep_checkpoints": 10, "save_freq": 30}, 5),
        ({"keep_checkpoints": 10, "save_freq": 30, "save_every_s": 60}, 11),
    ):
        assert replace(run.config, **changes).most_checkpoints(steps=100) == most, changes
    assert GrpoConfig(keep_checkpoints=5, keep_best=1).training().most_checkpoints(steps=100) == 7

    free = run.job.disk_bytes + SPARE_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, free))
    checked(run.config, run.job.start, 100, run.job.disk_bytes)
    free -= 1
    with pytest.raises(OSError, match="no space for the checkpoints"):
        checked(run.config, run.job.start, 100, run.job.disk_bytes)
    resumed = replace(run.config, resume=True)
    for step in (1, 2):
        folder = run.job.checkpoints_dir / f"step_{step:08d}"
        commit(
            folder, replace(run.job.start, step=step), write_pieces(folder, {TRAINABLE: pieces_of(checkpoint_size)}), 0
        )
    free = checkpoint_size + weights + SPARE_BYTES
    checked(resumed, run.job.start, 100, run.job.disk_bytes)
    free = checkpoint_size + SPARE_BYTES - 10_000  # of more than it keeps, too, the next one comes first
    with pytest.raises(OSError, match="no space for the checkpoints"):
        checked(resumed, run.job.start, 100, checkpoint_size)
    with pytest.raises(ValueError, match="2 steps are done, and --grpo.iterations says 1: "):
        checked(GrpoConfig(output_dir=resumed.output_dir, resume=True), run.job.start, 1, checkpoint_size)


def test_finished_run_is_reported_and_extended_by_more_steps(finished, tmp_path, capsys, monkeypatch):
    run, exported = finished
    argv = [f"--output_dir={tmp_path / 'run'}", "--resume"]
    with monkeypatch.context() as capped:
        capped.setenv("MAX_TRAIN_STEPS", "9")
        assert not examine(parse_args(argv)).finished
    assert vla.main(argv) == 0
    printed = capsys.readouterr().out
    assert f"did all of its steps: its policy, {exported}; nothing is left" in printed and "a larger --steps" in printed
    shutil.copytree(run.job.checkpoints_dir, tmp_path / "kept")
    shutil.rmtree(run.job.checkpoints_dir)
    assert vla.main(argv) == 0 and "More steps: a new run, because no checkpoint" in capsys.readouterr().out
    shutil.copytree(tmp_path / "kept", run.job.checkpoints_dir)
    more = parse_args([*argv, "--steps=9"])
    assert not examine(more).finished
    with own_folder(more, run.job.start, 9, 0):
        prepare_folder(more)
        assert not (tmp_path / "run" / FINISHED_NAME).exists()
    assert json.loads((tmp_path / "run" / CONFIG_NAME).read_text())["steps"] == 9


def test_finished_run_with_damaged_policy_exports_again(finished, setting, tmp_path, capsys):
    run, exported = finished
    for lost, problem in {
        "policy_preprocessor_step_*": "lacks policy_preprocessor_step_",
        "policy_preprocessor.json": "lacks policy_preprocessor.json",
        "model.safetensors": "lacks model.safetensors",
        ".": "holds no policy",
    }.items():
        for path in list(exported.glob(lost)) if "*" in lost else [exported / lost]:
            remove(path)
        assert problem in result_problem(run.config)
        shutil.copytree(setting[2], exported, dirs_exist_ok=True)
    os.truncate(exported / "config.json", 0)
    assert "config.json is damaged" in result_problem(run.config)
    shutil.copytree(setting[2], exported, dirs_exist_ok=True)
    os.truncate(exported / "model.safetensors", (exported / "model.safetensors").stat().st_size // 2)
    argv = [f"--output_dir={tmp_path / 'run'}", "--resume", "--dry_run"]
    assert vla.main(argv) == 0
    printed = capsys.readouterr().out
    assert f"did all of its steps, but {exported}" in printed and "model.safetensors is damaged" in printed
    assert "it is written again" in printed and "Resuming     from step 2" in printed
    shutil.rmtree(run.job.checkpoints_dir)
    assert vla.main(argv) == 2 and "no checkpoint that can be used" in capsys.readouterr().err


def test_exported_policy_is_required_for_each_recorded_robot(setting, tmp_path):
    arm = shutil.copytree(setting[2], tmp_path / "pretrained_model" / "arm")
    config = SimpleNamespace(folder=tmp_path)
    assert result_problem(config) is None
    write_json(tmp_path / "run.json", {"robots": {"arm": {}, "gantry": {}}})
    assert "gantry holds no policy" in result_problem(config)
    shutil.copytree(arm, arm.with_name("gantry"))
    assert result_problem(config) is None


def test_finished_run_is_recognized_with_auto_options(finished, tmp_path, capsys, monkeypatch):
    run, exported = finished
    argv = flags((tmp_path, run.rows.metas[0].root, run.config.policy_path), output_dir=tmp_path / "run")
    argv += ["--resume", "--dataset.statistics=auto", "--dataset.image_size=auto"]
    assert vla.main(argv) == 0 and "nothing is left to do" in capsys.readouterr().out
    (exported / "model.safetensors").unlink()
    assert vla.main([*argv, "--dry_run"]) == 0 and "it is written again" in capsys.readouterr().out
    looks = []  # each lists the folder in a bucket
    monkeypatch.setattr("vla_finetuning.plan.preflight.is_finished", looks.append)
    assert vla.main([f"--output_dir={tmp_path / 'run'}", "--resume", "--dry_run"]) == 0 and len(looks) == 1


def test_episodes_by_hub_id_are_resolved():
    config = parse_args(
        ["--policy.path=/p", "--output_dir=/o", "--dataset.repo_id=a/b", '--dataset.episodes={"a/b": [1]}']
    )
    assert with_absolute_paths(config).dataset.episodes == [1]


def test_resume_with_other_statistics_or_environment_is_refused(setting, tmp_path):
    run = started(setting, tmp_path / "run")
    assert run.config.dataset.statistics == "stored"
    plan = run.job.start, run.job.steps, run.job.disk_bytes
    changed = replace(run.config, resume=True, dataset=replace(run.config.dataset, statistics="exact"))
    with pytest.raises(ValueError, match="--dataset.statistics was stored, is exact: a run keeps its statistics"):
        checked(changed, *plan)
    changed = replace(run.config, resume=True, env_type="two_bins")
    checked(changed, *plan)
    line = {"step": 2, "episodes": 50, "successes": 50}
    (tmp_path / "run" / "evaluations.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match="env_type was None, is two_bins: evaluations.jsonl has the success"):
        checked(changed, *plan)
    (tmp_path / "run" / "config.json").write_text(json.dumps(changed.to_json()))
    checked(replace(changed, env_type=None), run.job.start, run.job.steps, run.job.disk_bytes)  # none any more


def test_trained_run_without_checkpoint_is_not_restarted(finished, tmp_path, capsys):
    run, exported = finished
    argv = [f"--output_dir={tmp_path / 'run'}", "--resume", "--steps=9"]
    assert vla.main([*argv, "--dry_run"]) == 0 and "Resuming     from step 2" in capsys.readouterr().out
    trained = exported / "model.safetensors"
    trained.write_text("what was trained")
    remove(tmp_path / "run/checkpoints/step_00000002/state.json")
    for more in ([], ["--dry_run"]):
        assert vla.main([*argv, *more]) == 2
        assert "that of step 2 was written" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no checkpoint that can be used"), own_folder(parse_args(argv), None, 9, 0):
        pytest.fail("it began")
    with pytest.raises(ValueError, match="no checkpoint that can be used"):
        begin(run.job, Worker(torch.device("cpu")), deterministic=False)
    assert trained.read_text() == "what was trained" and (tmp_path / "run" / FINISHED_NAME).is_file()


PROGRAMS = {
    "vla": (parse_args, ["--batch_size=4"]),
    "value": (parse_value, ["--batch_size=4", "--outcome.success=next.success"]),
    "grpo": (parse_grpo, ["--env.type=two_bins", "--grpo.record_dataset=recorded"]),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_finished_run_is_recognized_by_relative_paths(setting, tmp_path, monkeypatch, program):
    parse, more = PROGRAMS[program]
    monkeypatch.chdir(setting[0])
    data = [] if program == "grpo" else [f"--dataset.root={setting[1].name}"]
    flags = [f"--output_dir=runs/{program}", "--policy.path=base", "--resume=auto", *data, *more]
    config = with_absolute_paths(parse(flags))
    assert config.output_dir == str(setting[0] / "runs" / program) and config.policy_path == str(setting[0] / "base")
    with own_folder(config, None, 1, 0):
        prepare_folder(config)
        step = config.folder / "checkpoints" / "step_00000001"
        commit(step, Progress(1, 8, {}, {}, "full", 8), write_pieces(step, {}), 0)
        finish(config.folder, 1)
    shutil.copytree(setting[2], config.folder / "pretrained_model")
    (config.folder / "labels.parquet").touch()
    assert examine(parse(flags)).finished and not examine(parse([*flags, "--seed=2"])).finished
    monkeypatch.chdir(tmp_path)
    assert examine(parse([f"--output_dir={setting[0]}/runs/{program}", "--resume"])).finished


def test_demo_reuses_its_output_folder(setting, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vla_finetuning.plan.demo.prepare_dataset", lambda _: str(setting[1]))
    (tmp_path / "outputs" / "demo").mkdir(parents=True)
    (tmp_path / "outputs" / "demo" / "report.html").touch()
    assert not examine(parse_args(["--preset=demo"])).finished


def test_prompts_over_tokenizer_max_length_are_refused(setting):
    with pytest.raises(ValueError, match=r"--policy.tokenizer_max_length=\d+: the tokenizer saved in .* of up to \d+"):
        run_of(setting, **{"policy.tokenizer_max_length": 8})


def test_plan_lists_features_that_are_not_read(setting, tmp_path):
    from lerobot.datasets.language import language_feature_info

    root = shutil.copytree(setting[1], tmp_path / "annotated")
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    info["features"] |= language_feature_info()
    info["features"]["observation.sound"] = {"dtype": "audio", "shape": [2], "names": None}
    path.write_text(json.dumps(info))
    text = describe(run_of(setting, **{"dataset.root": root}))  # no column of theirs is in the parquet files
    assert "not read: language_persistent, language_events, subtask" in text
    assert "not read: meta/info.json: feature 'observation.sound': dtype is 'audio'" in text
    info["features"]["action"]["dtype"] = "object"
    path.write_text(json.dumps(info))
    with pytest.raises(
        ValueError, match="no feature is called action.*not read of the dataset: .* 'action': dtype is 'object'"
    ):
        run_of(setting, **{"dataset.root": root})
