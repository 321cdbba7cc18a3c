"""The folder of a run: storage that cannot hold one is refused, and changes to one are reported."""

import errno
import json
import os
import re
from dataclasses import replace

import pytest

from tests.buckets import Bucket
from vla_finetuning.buckets.mirror import address, as_path, remove
from vla_finetuning.options.dataset import DatasetOptions
from vla_finetuning.options.job import CONFIG_NAME
from vla_finetuning.options.programs import PRESETS, Config, GrpoConfig, ValueConfig
from vla_finetuning.options.scaling import ScalingOptions
from vla_finetuning.run.attempts import start_attempt
from vla_finetuning.run.checkpoint import Progress, commit, write_pieces
from vla_finetuning.run.folder import (
    changed_options,
    check_folder,
    checkpoint_to_resume,
    claim_folder,
    own_folder,
    prepare_folder,
    resumption,
)


def test_changed_options_are_listed_on_resume(tmp_path):
    """Steps and learning rate change the schedule of what is left: no user should do that unawares."""
    started = Config(lr=1e-3, steps=100, scaling=ScalingOptions(num_workers=2), output_dir=str(tmp_path))
    (tmp_path / CONFIG_NAME).write_text(json.dumps(started.to_json()))
    resumed = replace(started, resume=True, lr=5e-4, scaling=replace(started.scaling, num_workers=4))
    follows = "the learning rate of the steps that are left changes with it"
    assert changed_options(resumed) == [f"lr was 0.001, is 0.0005; {follows}", "scaling.num_workers was 2, is 4"]
    assert changed_options(replace(started, resume=True)) == []
    assert changed_options(replace(resumed, resume=False)) == []
    idle = replace(started.dataset, max_skipped=0.5)  # --dataset.on_error is not skip
    assert changed_options(replace(started, resume=True, dataset=idle)) == []
    earlier = started.to_json()
    del earlier["train"]["flow_weight"]  # as an earlier version wrote it
    (tmp_path / CONFIG_NAME).write_text(json.dumps(earlier))
    assert changed_options(replace(started, resume=True)) == []


def test_resume_refuses_changed_ranking_and_statistics(tmp_path):
    start_attempt(tmp_path, 0, 1)
    checkpoint(tmp_path, 20)
    started = Config(output_dir=str(tmp_path), keep_best=1)
    (tmp_path / CONFIG_NAME).write_text(json.dumps(started.to_json()))
    resumed = replace(started, resume=True)
    for changed, message in (
        (replace(resumed, max_eval_samples=5), "--max_eval_samples was 0, is 5: the best checkpoint .* --keep_best 0"),
        (replace(resumed, dataset=DatasetOptions(statistics="exact")), "a run keeps its statistics"),
    ):
        with pytest.raises(ValueError, match=message), own_folder(changed, START, 100, 0):
            pass
    for unranked in (replace(resumed, keep_best=0), replace(resumed, keep_best_by="success")):
        with own_folder(replace(unranked, max_eval_samples=5), START, 100, 0):
            pass


@pytest.mark.parametrize("lacking", ["rename", "replace"])
def test_storage_without_rename_or_replace_is_refused(tmp_path, monkeypatch, lacking):
    """As a bucket that is mounted: folders cannot be renamed there, files not replaced."""
    config = Config(output_dir=str(tmp_path / "run"))

    def refused(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    with monkeypatch.context() as mounted:
        mounted.setattr(os, lacking, refused)
        with (
            pytest.raises(
                OSError, match=r"output_dir=.*run: its storage, perhaps a mounted bucket, cannot .*choose a folder"
            ),
            claim_folder(config.folder),
        ):
            pytest.fail("it was claimed")
        assert not config.folder.exists(), "what is refused leaves nothing"
    with claim_folder(config.folder):  # nor does it stay locked
        assert [path.name for path in config.folder.iterdir()] == [".lock"]


START = Progress(step=0, rows=0, stream={}, base={}, mode="full", global_batch_size=8)


def checkpoint(folder, step):
    path = folder / "checkpoints" / f"step_{step:08d}"
    commit(path, replace(START, step=step, rows=8 * step), write_pieces(path, {}), 0)
    return path


def write(folder, name, text):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


@pytest.mark.parametrize("name", ["state.json", ""])
def test_trained_run_without_usable_checkpoint_is_refused(tmp_path, name):
    """Whether its only checkpoint is gone, or damaged."""
    newest = checkpoint(tmp_path, 20)
    write(tmp_path, "last_checkpoint.json", '{"step": 20, "attempt": 0}')
    assert checkpoint_to_resume(tmp_path) == newest
    remove(newest / name)
    with pytest.raises(ValueError, match=r"no checkpoint that can be used, but that of step 20 was.*copy a checkpoint"):
        checkpoint_to_resume(tmp_path)
    newest = checkpoint(tmp_path, 4)
    assert checkpoint_to_resume(tmp_path) == newest
    (newest / "state.json").write_text('{"format": 2}')
    write(tmp_path, "last_checkpoint.json", '{"step": 4, "attempt": 0}')
    with pytest.raises(ValueError, match=r"step 4 was .*format 2, .*finish the run with the version that began it"):
        checkpoint_to_resume(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("last_checkpoint.json", b"", "cannot be read as JSON .* or remove it"),
        ("metrics.jsonl", b'{"step": 1}\n\0\xff\n', "line 2 cannot be read as JSON .* delete it"),
    ],
)
def test_resume_names_a_file_damaged_by_a_power_cut(tmp_path, bucket_url, name, text, message):
    for folder in (tmp_path, as_path(bucket_url)):
        (folder / name).write_bytes(text)
        with pytest.raises(ValueError, match=f"^{re.escape(address(folder))}/{name}: {message}"):
            resumption(folder)


def test_run_without_checkpoint_restarts_at_step_0(tmp_path):
    start_attempt(tmp_path, 0, 2)
    write(tmp_path, "metrics.jsonl", '{"step": 3}\n')
    write_pieces(tmp_path / "checkpoints" / "step_00000005", {})
    (tmp_path / "pretrained_model").mkdir()
    assert checkpoint_to_resume(tmp_path) is None
    logged = "steps to 3 were logged, and those after 0 are done again"
    assert resumption(tmp_path) == f"from step 0: no checkpoint has been written yet; {logged}"


def test_checkpoint_of_superseded_attempt_is_ignored(tmp_path):
    """A process that was thought dead wrote its checkpoint when the next attempt had begun at step 0."""
    write(tmp_path, "last_checkpoint.json", '{"step": 5, "attempt": 0}')
    for _ in range(2):
        start_attempt(tmp_path, 0, 1)
    assert checkpoint_to_resume(tmp_path) is None


def test_resumption_names_its_step_and_lost_steps(tmp_path, caplog):
    start_attempt(tmp_path, 0, 2)
    checkpoint(tmp_path, 10)
    newest = checkpoint(tmp_path, 20)
    write(tmp_path, "last_checkpoint.json", '{"step": 20, "attempt": 0}')
    write(tmp_path, "metrics.jsonl", '{"step": 20}\n')
    assert resumption(tmp_path) == "from step 20" and not caplog.text
    (newest / "state.json").write_text("{")
    assert resumption(tmp_path) == (
        "from step 10; the checkpoint of step 20 was written, and cannot be used any more; steps to 20 were "
        "logged, and those after 10 are done again"
    )
    assert "state.json is missing or damaged" in caplog.text


def test_refused_run_removes_parent_folders_it_created(tmp_path):
    (tmp_path / "parent").mkdir()
    with pytest.raises(KeyError), claim_folder(tmp_path / "parent" / "a" / "b"):
        raise KeyError
    assert list(tmp_path.iterdir()) == [tmp_path / "parent"] and not any((tmp_path / "parent").iterdir())
    with pytest.raises(KeyError), claim_folder(tmp_path / "parent"):
        raise KeyError
    assert list(tmp_path.iterdir()) == [tmp_path / "parent"] and not any((tmp_path / "parent").iterdir())


def test_folder_of_a_process_killed_before_its_options_is_free(tmp_path, monkeypatch):
    """A job with --resume auto starts there again, and removes what was left."""
    for name in (".storage-x", ".removed_films", ".metrics.jsonl.12"):
        (tmp_path / name).mkdir()
    config = Config(output_dir=str(tmp_path))
    with monkeypatch.context() as killed, pytest.raises(KeyError):
        killed.setattr(os, "replace", lambda *_: {}["killed"])
        prepare_folder(config)
    check_folder(config)
    prepare_folder(config)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.json", "checkpoints"}


def test_refused_run_deletes_no_hidden_files_of_others(bucket_url):
    Bucket(bucket_url).write(".git/config", b"x")
    config = Config(output_dir=bucket_url)
    with pytest.raises(FileExistsError, match="is not empty: it holds no run"):
        check_folder(config)
    with pytest.raises(KeyError), claim_folder(config.folder):
        raise KeyError
    assert Bucket(bucket_url).read(".git/config") == b"x"


def test_refused_bucket_folder_is_not_downloaded(bucket_url):
    Bucket(bucket_url).write("videos/top.mp4", b"x")
    config = Config(output_dir=bucket_url)
    with pytest.raises(FileExistsError, match="is not empty: it holds no run"):
        check_folder(config)
    assert not [*config.folder.rglob("*.mp4")]


def test_demo_refuses_to_empty_a_folder_with_inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / PRESETS["demo"]["output_dir"]
    write(folder, "pretrained_model/config.json", "{}")
    demo = Config(preset="demo", output_dir=str(folder))
    check_folder(demo)
    with pytest.raises(FileExistsError, match=r"empties this folder, and policy_path=.*pretrained_model is in it"):
        check_folder(replace(demo, policy_path=str(folder / "pretrained_model")))
    mixture = DatasetOptions(mixture={"/elsewhere": 1.0, str(folder / "rollouts"): {"weight": 1.0}})
    with pytest.raises(FileExistsError, match=r"empties this folder, and dataset.mixture=.*rollouts is in it"):
        check_folder(replace(demo, dataset=mixture))
    write(folder, "config.json", "{}")
    for other in (GrpoConfig(preset="demo"), ValueConfig(preset="demo")):
        with pytest.raises(FileExistsError, match="is not empty: --resume goes on with the run it holds"):
            check_folder(replace(other, output_dir=str(folder)))
