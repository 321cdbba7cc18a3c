"""Checkpoints on a disk: every tensor comes back bitwise, damaged ones are refused, and the right ones are deleted."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.cuda import _pin_memory_utils

from tests.data.test_hostile import json_values
from util import make_trainable_optimizer
from vla_finetuning.files import append_line
from vla_finetuning.options.grpo import CRITIC
from vla_finetuning.options.programs import Config
from vla_finetuning.run import checkpoint, manifest
from vla_finetuning.run.checkpoint import (
    OPTIMIZER,
    SPARE_BYTES,
    TRAINABLE,
    Piece,
    Progress,
    Staging,
    best_checkpoint,
    check_resumable,
    checkpoint_names,
    checkpoint_sizes,
    checkpoints,
    commit,
    latest_checkpoint,
    load_checkpoint,
    load_progress,
    prune,
    require_space,
    set_aside_damaged,
    write_pieces,
)
from vla_finetuning.run.folder import prune_checkpoints

PROGRESS = Progress(
    step=7, rows=56, stream={"seed": 0, "rows_per_epoch": 99}, base={"digest": "x"}, mode="full", global_batch_size=8
)


def make_checkpoint(folder: Path, step: int = 7, loss: float | None = None, eval_loss: float | None = None) -> Path:
    progress = replace(PROGRESS, step=step, rows=step * 8, loss=loss, eval_loss=eval_loss)
    weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
    path = folder / f"step_{step:08d}"
    save_tensors(path, {TRAINABLE: {"a.weight": weight}, OPTIMIZER: {"exp_avg.a.weight": weight * 2}}, progress)
    return path


def save_tensors(path: Path, tensors: dict[str, dict[str, torch.Tensor]], progress: Progress, writers: int = 1) -> None:
    """Split rows among the writers as torch.chunk does."""

    def piece(tensor: torch.Tensor, number: int) -> Piece:
        if writers == 1:
            return Piece(tensor, (0,) * tensor.ndim)
        rows = -(-len(tensor) // writers)
        first = min(number * rows, len(tensor))
        return Piece(tensor[first : first + rows], (first, *[0] * (tensor.ndim - 1)))

    files = {}
    for number in range(writers):
        pieces = {kind: {name: piece(t, number) for name, t in group.items()} for kind, group in tensors.items()}
        files |= write_pieces(path, pieces, number, writers)
    commit(path, progress, files, 0)


def empty_tensors() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return {"a.weight": torch.zeros(3, 4)}, {"exp_avg.a.weight": torch.zeros(3, 4)}


@pytest.mark.parametrize("writers", [1, 2, 5])
def test_checkpoint_roundtrip_is_bitwise_equal(tmp_path, writers):
    weight = torch.randn(3, 4)
    path = tmp_path / "step_00000007"
    save_tensors(
        path, {TRAINABLE: {"a.weight": weight}, OPTIMIZER: {"exp_avg.a.weight": weight * 2}}, PROGRESS, writers
    )
    trainable, optimizer = empty_tensors()
    assert load_checkpoint(path, trainable, optimizer) == PROGRESS == load_progress(path)
    assert torch.equal(trainable["a.weight"], weight)
    assert torch.equal(optimizer["exp_avg.a.weight"], weight * 2)
    numbers = [""] if writers == 1 else [f"-{n:05d}-of-{writers:05d}" for n in range(1, writers + 1)]
    files = {f"{kind}{number}.safetensors" for kind in (TRAINABLE, OPTIMIZER) for number in numbers}
    assert {p.name for p in path.iterdir()} == {"state.json", "attempt-00000"}
    assert {p.name for p in (path / "attempt-00000").iterdir()} == files
    assert checkpoint_names(path, OPTIMIZER) == {"exp_avg.a.weight"}
    policy_only, _ = empty_tensors()
    load_checkpoint(path, policy_only)
    assert torch.equal(policy_only["a.weight"], weight)


def test_checkpoint_with_other_names_or_shapes_is_refused(tmp_path):
    path = make_checkpoint(tmp_path)
    trainable, optimizer = empty_tensors()
    average = {"average.a.weight": torch.zeros(3, 4)}
    for tensors, message in (
        (({**trainable, "b.weight": torch.zeros(1)},), r"another trainable state, e.g. \['b.weight'\]"),
        ((trainable, {}), r"another optimizer state, e.g. \['exp_avg.a.weight'\]"),
        (({"a.weight": torch.zeros(4, 3)},), r"cannot be read: .*\[3, 4\].*\[4, 3\]"),
        ((trainable, None, average), "without an average of the weights: start without --ema.enable"),
    ):
        with pytest.raises(ValueError, match=message):
            load_checkpoint(path, *tensors)
    stored = path / "attempt-00000"
    shutil.copyfile(stored / "trainable.safetensors", stored / "trainable-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"trainable-00001-of-00002.safetensors'\] are not of this checkpoint"):
        load_checkpoint(path, trainable, optimizer)


def test_read_error_is_not_reported_as_damaged_checkpoint(tmp_path, monkeypatch):
    """Another attempt may read it, so it must not end the run as a bad file does."""
    path, read_data = make_checkpoint(tmp_path), "torch.distributed.checkpoint.HuggingFaceStorageReader.read_data"
    for error, raised in ((OSError(5, "Input/output error"), OSError), (FileNotFoundError(2, "No file"), ValueError)):
        monkeypatch.setattr(read_data, Mock(side_effect=error))
        with pytest.raises(raised, match=f"cannot be read: .*{error.strerror}"):
            load_checkpoint(path, {"a.weight": torch.zeros(3, 4)})


def test_policy_loads_without_the_critic(tmp_path):
    path = tmp_path / "step_00000007"
    tensors = {"a": torch.ones(2), f"{CRITIC}b": torch.ones(2), f"{CRITIC}c": torch.ones(2)}
    save_tensors(
        path, {TRAINABLE: tensors, OPTIMIZER: {"step.a": torch.ones(1), f"{CRITIC}step": torch.ones(1)}}, PROGRESS
    )
    wanted = {name: torch.zeros(2) for name in tensors}
    load_checkpoint(path, wanted)
    assert all(tensor.all() for tensor in wanted.values())
    alone = {"a": torch.zeros(2)}
    load_checkpoint(path, alone)
    assert alone["a"].all()
    for trainable, optimizer in (({"a": alone["a"], f"{CRITIC}b": torch.zeros(2)}, None), (alone, alone)):
        with pytest.raises(ValueError, match="it holds another"):
            load_checkpoint(path, trainable, optimizer)


def test_leftovers_of_dead_attempts_are_removed(tmp_path, monkeypatch):
    """Beside a later attempt's files, and where no attempt wrote all."""
    path = tmp_path / "step_00000007"
    for folder in (path, tmp_path / "step_00000009"):
        write_pieces(folder, {TRAINABLE: {"a": Piece(torch.ones(1), (1,))}}, 1, 2)
    whole = {TRAINABLE: {"a": Piece(torch.zeros(2), (0,))}}
    commit(path, PROGRESS, write_pieces(path, whole, attempt=1), 1)
    with monkeypatch.context() as busy:  # as a network drive with a file that a dead process has open
        busy.setattr(checkpoint, "remove", Mock(side_effect=OSError("Directory not empty")))
        assert set_aside_damaged(tmp_path) == path
    (tmp_path / ".removed_step_00000003").mkdir()  # of a process that was killed while it deleted
    (tmp_path / ".removed_step_00000003" / "trainable.safetensors").touch()
    assert set_aside_damaged(tmp_path) == path
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.*")) == [
        f"{path.name}/attempt-00001/trainable.safetensors",
        f"{path.name}/state.json",
    ]
    with pytest.raises(RuntimeError, match="another process has taken over this run; step_00000007 is not written"):
        commit(path, PROGRESS, write_pieces(path, whole), 0)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def nest(path: Path) -> None:
    path.write_text("[" * 10**6)


@pytest.mark.parametrize("name", [f"attempt-00000/{TRAINABLE}.safetensors", checkpoint.STATE])
@pytest.mark.parametrize("damage", [truncate, flip, nest, Path.unlink])
def test_damaged_checkpoint_falls_back_to_the_previous_one(tmp_path, name, damage, caplog):
    before, newest = make_checkpoint(tmp_path, 5), make_checkpoint(tmp_path, 7)
    assert set_aside_damaged(tmp_path) == latest_checkpoint(tmp_path) == newest
    damage(newest / name)
    assert set_aside_damaged(tmp_path) == before
    is_gone = damage == Path.unlink and name == checkpoint.STATE
    assert is_gone or f"checkpoint {newest}: {Path(name).name}" in caplog.text
    # Everybody else now finds the same, without reading it.
    assert latest_checkpoint(tmp_path) == before
    assert (tmp_path / f"damaged_{newest.name}").exists() == (damage == flip and name != checkpoint.STATE)


def test_crash_during_commit_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    before = make_checkpoint(tmp_path, 5)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", Mock(side_effect=KeyboardInterrupt))
        make_checkpoint(tmp_path, 7)
    assert latest_checkpoint(tmp_path) == set_aside_damaged(tmp_path) == before
    assert list(tmp_path.iterdir()) == [before]


def test_prune_retains_newest_and_best_checkpoints(tmp_path, caplog, monkeypatch):
    for step, loss in enumerate((0.9, 0.2, None, 0.5, float("nan"), 0.7), start=1):
        make_checkpoint(tmp_path, step, loss)
    prune(tmp_path, keep=2, keep_best=2)
    assert sorted(int(path.name[5:]) for path in tmp_path.iterdir()) == [2, 4, 5, 6]
    monkeypatch.setattr(os, "rename", Mock(side_effect=PermissionError("not yours")))
    prune(tmp_path, keep=2, keep_best=1)
    assert "could not be deleted (not yours); training goes on" in caplog.text
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("damage", [truncate, Path.unlink])
def test_prune_does_not_count_incomplete_checkpoints(tmp_path, damage):
    """It may be the newest by its name, and is left for a person to look at."""
    for step in (3, 4, 5, 8):
        make_checkpoint(tmp_path, step)
    damage(tmp_path / "step_00000008" / "attempt-00000" / "optimizer.safetensors")
    prune(tmp_path, keep=2, keep_best=0)
    assert sorted(checkpoints(tmp_path)) == [4, 5, 8]
    assert latest_checkpoint(tmp_path).name == "step_00000005"


def test_renamed_checkpoint_copies_are_ignored(tmp_path):
    """As `cp -r step_00000005 step_00000005_good`: it stays, nothing is resumed from it, and nothing else changes."""
    for step in (5, 6, 7):
        make_checkpoint(tmp_path, step)
    copies = [shutil.copytree(tmp_path / "step_00000007", tmp_path / name) for name in ("step_00000007_good", "step_x")]
    assert latest_checkpoint(tmp_path) == set_aside_damaged(tmp_path) == tmp_path / "step_00000007"
    assert list(checkpoints(tmp_path)) == [5, 6, 7]
    prune(tmp_path, keep=1, keep_best=0, waiting=lambda step: step == 6)
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "step_00000006", tmp_path / "step_00000007", *copies])
    assert checkpoints(tmp_path / "absent") == {}


def test_best_checkpoint_is_ranked_by_held_out_loss(tmp_path):
    """Before any training loss, and whatever that says; of equals the newest."""
    for step, (loss, eval_loss) in enumerate([(0.9, 0.3), (0.1, 0.5), (0.0, None), (0.8, 0.3), (0.05, 0.4)], start=1):
        make_checkpoint(tmp_path, step, loss, eval_loss)
    assert best_checkpoint(tmp_path).name == "step_00000004"
    prune(tmp_path, keep=1, keep_best=2)
    assert sorted(int(path.name[5:]) for path in tmp_path.iterdir()) == [1, 4, 5]
    assert best_checkpoint(tmp_path / "absent") is None


def test_prune_retains_most_successful_and_unevaluated_checkpoints(tmp_path, caplog, monkeypatch):
    def left(**options):
        prune(tmp_path, keep=1, keep_best=1, **options)
        return sorted(int(path.name[5:]) for path in tmp_path.iterdir())

    for step, loss in enumerate((0.9, 0.2, 0.3, 0.5, 0.1, 0.7), start=1):
        make_checkpoint(tmp_path, step, loss)
    half = ((0.5, 0.25), (0.5, 0.25))
    whole = {1: half, 3: half, 4: ((0.25, 0.25),) * 2, 2: ((0.0, 0.0),) * 2}
    assert left(success=whole, waiting=lambda step: step == 5) == [3, 5, 6]
    size = sum(file.stat().st_size for file in (tmp_path / "step_00000005").rglob("*.*"))
    assert checkpoint_sizes(tmp_path)[1] == size
    space = SimpleNamespace(free=2 * size + SPARE_BYTES)  # for two more of it
    monkeypatch.setattr(shutil, "disk_usage", lambda path: space)
    assert left(success={3: half}, waiting=lambda step: step == 5) == [3, 5, 6] and not caplog.text
    space.free -= 1
    assert left(success={3: half}, waiting=lambda step: step == 5) == [3, 6]
    assert "step_00000005 is deleted before its evaluation is complete: the disk is" in caplog.text


def test_episodes_with_errors_do_not_rank_checkpoints(tmp_path):
    """Of each (successes, errors) of 50 episodes: only what is worse, whatever its errors would have been, goes.

    Among equals success at the end decides.
    """
    of_50 = {1: (45, 0), 2: (1, 49), 3: (40, 4), 4: (40, 5), 5: (30, 0), 6: (0, 50), 7: (45, 0)}
    folder = tmp_path / "checkpoints"
    for step, (successes, errors) in of_50.items():
        make_checkpoint(folder, step)
        line = {"step": step, "successes": successes, "episodes": 50 - errors, "errors": errors}
        line["successes_at_end"] = successes - (step == 7)
        append_line(tmp_path / "evaluations.jsonl", json.dumps(line))
    make_checkpoint(folder, 8)
    config = Config(
        output_dir=str(tmp_path), env_type="two_bins", env_eval_freq=1, keep_best=1, keep_best_by="success", save_freq=1
    )
    append_line(tmp_path / "evaluations.jsonl", json.dumps({**line, "step": 8}))
    prune_checkpoints(replace(config, keep_checkpoints=1), 8)
    assert sorted(checkpoints(folder)) == [1, 2, 4, 6, 8]


@pytest.fixture
def cuda_stub(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))


def test_staging_memory_is_reused_and_pinned_once(monkeypatch, cuda_stub):
    """Record calls of the driver's stub on a CPU."""
    pinned, unpinned, devices = [], [], {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.update({threading.get_ident(): device}))
    # Record the current device of the pinning thread.
    monkeypatch.setattr(
        _pin_memory_utils, "pin_memory", lambda at, size: pinned.append((at, size, devices.get(threading.get_ident())))
    )
    monkeypatch.setattr(_pin_memory_utils, "unpin_memory", unpinned.append)
    wide = torch.randn(4, 6)
    tensors = {
        "a": torch.nn.Parameter(torch.randn(7, 3)),
        "step": torch.tensor(2.0),
        "low": torch.randn(5).bfloat16(),
        "none": torch.ones(0),
        "shard": wide[1:3, :5],  # as FSDP2's are of padded ones
    }
    staging = Staging(tensors)
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    first = staging.copied(tensors)
    assert all(torch.equal(first[name], before[name]) and first[name].shape == before[name].shape for name in tensors)
    assert not any(type(copy) is torch.nn.Parameter for copy in first.values())
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.mul_(2)
    assert torch.equal(first["a"], before["a"])
    second = staging.copied(tensors)
    assert {name: t.data_ptr() for name, t in first.items()} == {name: t.data_ptr() for name, t in second.items()}
    assert all(torch.equal(second[name], 2 * before[name]) for name in tensors)
    staging.close()
    assert not pinned and not unpinned and not devices  # only for a GPU

    gpu = torch.device("cuda", 3)
    with FakeTensorMode():
        assert Staging._gpu_of({"a": torch.ones(3), "b": torch.ones(3, device=gpu)}) == gpu
    monkeypatch.setattr(Staging, "_gpu_of", staticmethod(lambda tensors: gpu))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    staging = Staging(tensors)
    first = staging.copied(tensors)
    assert [(size, device) for _, size, device in pinned] == [(7 * 3 * 4, gpu), (5 * 2, gpu), (4 * 6 * 4, gpu)]
    assert threading.get_ident() not in devices and not unpinned
    staging.close()
    del first
    assert sorted(unpinned) == sorted(at for at, _, _ in pinned)


def test_staging_works_if_pinning_fails(monkeypatch, cuda_stub, caplog):
    refusal = Mock(side_effect=RuntimeError("locked memory is limited"))
    monkeypatch.setattr(_pin_memory_utils, "pin_memory", refusal)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(Staging, "_gpu_of", staticmethod(lambda tensors: torch.device("cuda", 0)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    tensors = {"a": torch.ones(3)}
    staging = Staging(tensors)
    assert staging.copied(tensors)["a"].sum() == 3
    assert "locked memory is limited" in caplog.text
    staging.close()


def test_checkpoints_have_usual_permissions(tmp_path, assert_usual_permissions):
    assert_usual_permissions(make_checkpoint(tmp_path / "checkpoints").parent)


def rewrite(folder: Path, **changes) -> None:
    """Change keys of state.json and its checksum; `...` removes a key."""
    state = json.loads((folder / checkpoint.STATE).read_text()) | changes
    state = {key: value for key, value in state.items() if value is not ... and key != "sha256"}
    (folder / checkpoint.STATE).write_text(json.dumps({**state, "sha256": manifest._digest(state)}))


ENTRY = {"bytes": 3, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 99}, "format 99, this version reads 3"),
        ({"files": ...}, "no 'files'"),
        ({"files": None}, "'items'"),
        ({"files": [["trainable.safetensors", ENTRY]]}, "'items'"),
        ({"files": {"../secret": ENTRY}}, "'../secret' is no file of a checkpoint"),
        ({"files": {"/etc/hostname": ENTRY}}, "is no file of a checkpoint"),
        ({"files": {"x" * 5000: ENTRY}}, "is no file of a checkpoint"),
        ({"files": {"trainable.safetensors": {}}}, "no 'bytes'"),
        ({"files": {"trainable.safetensors": None}}, "not subscriptable"),
        ({"files": {"trainable.safetensors": {**ENTRY, "bytes": "3"}}}, "size and checksum of trainable.safetensors"),
        ({"attempt": "../other"}, "attempt is '../other'"),
        ({"progress": ...}, "no 'progress'"),
        ({"progress": {**PROGRESS.__dict__, "step": "7"}}, "step is '7'"),
        ({"progress": {**PROGRESS.__dict__, "base": None}}, "base is None"),
    ],
)
def test_invalid_state_json_is_a_damaged_checkpoint(tmp_path, changes, message, caplog):
    """Named, and the one before is taken: also where its checksum fits, which anybody can compute."""
    before, newest = make_checkpoint(tmp_path, 5), make_checkpoint(tmp_path, 7)
    rewrite(newest, **changes)
    with pytest.raises(ValueError, match=f"checkpoint {newest}: state.json is missing or damaged .*{message}"):
        load_progress(newest)
    assert latest_checkpoint(tmp_path) == set_aside_damaged(tmp_path) == before


files_of_any_form = json_values | st.dictionaries(
    st.text(max_size=8) | st.just("trainable.safetensors"),
    json_values | st.fixed_dictionaries({"bytes": json_values, "sha256": json_values}),
)


@given(files_of_any_form, st.just(PROGRESS.__dict__) | json_values)
def test_arbitrary_state_json_loads_or_raises_value_error(files, progress):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / checkpoint.STATE).write_text('{"format": 3, "attempt": 0}')
        rewrite(folder, files=files, progress=progress)
        try:
            assert load_progress(folder) == PROGRESS and files == {}
        except ValueError as error:
            assert str(error).startswith(f"checkpoint {folder}: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "heads"}, "what trains is heads, but the run was started with full"),
        ({"base": {"digest": "y"}}, "base policy is not the one"),
        ({"base": {"digest": "x", "files": {"a": 9, "b": 2}}}, "a, c changed, came or went"),
        ({"stream": {"seed": 1, "rows_per_epoch": 99}}, "seed: was 0, is 1"),
        ({"stream": {"seed": 0, "rows_per_epoch": 99, "new": 1}}, "[(]new: was None, is 1[)]"),
        ({"stream": {"seed": 0}}, "[(]rows_per_epoch: was 99, is None[)]"),
        ({"global_batch_size": 16}, "a step has 16 rows, but the run was started with 8"),
    ],
)
def test_checkpoint_of_another_run_is_refused(change, message):
    base = {"digest": "x", "files": {"a": 1, "b": 2, "c": 3}} if "files" in str(change) else PROGRESS.base
    progress = replace(PROGRESS, base=base)
    check_resumable(progress, replace(progress, step=0, rows=0))
    with pytest.raises(ValueError, match=message):
        check_resumable(progress, replace(progress, **change))


def test_missing_disk_space_is_reported_before_writing(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 10**6))
    with pytest.raises(OSError, match=r"no space for a checkpoint in .*GB needed.*0.00 GB free"):
        make_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, SPARE_BYTES + 1000))
    require_space(tmp_path / "not" / "yet", 1000, "the run")
    with pytest.raises(OSError, match="no space for the run"):
        require_space(tmp_path / "not" / "yet", 1001, "the run")
    # One of two processes, when the other has written its files.
    piece = {TRAINABLE: {"a": Piece(torch.zeros(100), (0,))}, OPTIMIZER: {"b": Piece(torch.zeros(100), (0,))}}
    write_pieces(tmp_path / "step_00000001", piece, 1, 2)


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounting needs root on Linux")
def test_full_disk_leaves_no_partial_checkpoint(tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], check=False).returncode:
        pytest.skip("cannot mount a small disk here")
    try:
        monkeypatch.setattr(checkpoint, "require_space", lambda *_: None)
        path = disk / "step_00000001"
        with pytest.raises(OSError, match=r"checkpoint not written to .* \(0.00 GB needed\)"):
            write_pieces(path, {TRAINABLE: {"a": Piece(torch.zeros(10**6), (0,))}})
        assert latest_checkpoint(disk) is set_aside_damaged(disk) is None
        assert not list(disk.rglob("*.*"))
    finally:
        subprocess.run(["umount", disk], check=True)


def test_checkpoint_includes_batch_norm_statistics(tmp_path):
    """Batch norms count in buffers, which no optimizer sees."""

    def make():
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        model.register_buffer("recreated", torch.zeros(1), persistent=False)
        constants = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
        return model, make_trainable_optimizer(model, schedule=lambda step: 1e-3, clip_norm=1.0, **constants)

    model, optimizer = make()
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step(0)
    path = tmp_path / "step_00000007"
    save_tensors(path, {TRAINABLE: optimizer.named(), OPTIMIZER: optimizer.state()}, PROGRESS)
    resumed, resumed_optimizer = make()
    load_checkpoint(path, resumed_optimizer.named(), resumed_optimizer.state())
    assert resumed[1].num_batches_tracked == 1 and resumed[1].running_var.ne(1).all()
    for name, value in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
