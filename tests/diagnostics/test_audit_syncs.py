"""The audit of device syncs, on the real loop and on planted syncs."""

import contextlib
import gc
import operator
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import step
from diagnostics import audit_syncs
from tests import in_process
from tests.datasets import make_dataset
from tests.training.test_as_lerobot import resolved
from util import DeviceMetrics, NumpyToTorchCollate, TrainableOptimizer
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.plan.resolve import resolve
from vla_finetuning.policies import trainable
from vla_finetuning.policies.compiling import Compiler
from vla_finetuning.policies.families import pi05
from vla_finetuning.policies.families.pi05 import PI05Loss
from vla_finetuning.policies.processors import DeviceHalf
from vla_finetuning.training import feed, state

CPU = torch.device("cpu")


def flags(setting, **changes):
    return in_process.flags(setting, **{"scaling.use_gpu": None, "train.mode": "heads", **changes})


@pytest.fixture(scope="module")
def run(setting):
    return resolve(parse_args(flags(setting)), gpus_found=0)


@pytest.fixture
def one_step(monkeypatch):
    """One optimizer step, two micro-batches, between two log steps; without garbage collection, which takes longest."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
    monkeypatch.setattr(audit_syncs, "WINDOW_STEPS", 1)


def plant(monkeypatch, planted):
    """Replace PI0.5's loss by a cheap one that is passed to the planted function."""

    def forward(self, batch, noise, time):
        weights = sum(parameter.sum() for parameter in self.parameters() if parameter.requires_grad)
        loss = weights * noise.mean() + batch["action"].mean()
        planted(loss)
        return loss

    monkeypatch.setattr(PI05Loss, "forward", forward)


def by_name(report, planted=None):
    """Map names to times, by the line of `planted`, else by function; all must be in this file."""
    assert {sync.where.file for sync in report.syncs} <= {__file__}, report.table()
    name_of = {function.__code__.co_firstlineno: name for name, function in (planted or {}).items()}
    wheres = {sync.where: sync.times for sync in report.syncs}
    return {name_of.get(where.number, where.function.rsplit(".")[-1]): times for where, times in wheres.items()}


# --- our loop ---------------------------------------------------------------------------------------------


@pytest.mark.gate
@pytest.mark.parametrize(
    "mode, flag", [("heads", "train.augmentation=openpi"), ("full", "dataset.image_transforms.enable=true")]
)
def test_training_loop_has_no_syncs(setting, mode, flag, capsys):
    name, value = flag.split("=")
    options = {"train.mode": mode, "train.mask_padding": "true", "scaling.use_gpu": "false", "ema.enable": "true"}
    options[name] = value
    assert audit_syncs.main(flags(setting, **options)) == 0
    printed = capsys.readouterr().out
    assert "Nothing waits for the device in 2 steps of 2 micro-batches between two log steps." in printed
    assert "Not seen   the backward on CUDA" in printed
    assert not (setting[0] / "run").exists()


def test_callbacks_add_no_syncs(tmp_path, one_step):
    """Every callback that a run can have adds no place."""
    root = make_dataset(tmp_path / "dataset", episodes=(12, 9, 10), cameras={"observation.images.top": (48, 64)})
    attached = {
        **{"run.record_rows": "true", "train.exact_mean": "true", "dataset.on_error": "skip", "ema.enable": "true"},
        **{"save_every_s": 3600, "dataset.eval_split": 0.3},
    }

    def places(**options):
        run = resolved(root, "smolvla", tmp_path / "run", **{"train.mode": "expert", **options})
        return {(sync.operation, str(sync.where)) for sync in audit_syncs.audit(run).syncs}

    assert places(**attached) <= places()


def test_audit_covers_every_part_of_the_step(run, monkeypatch, one_step):
    looks = {
        "noise": (pi05, "sample_noise_and_time", lambda args, drawn: drawn[0].sum().item()),
        "images": (DeviceHalf, "forward", lambda args, batch: batch["observation.images.top"].sum().item()),
        "forward": (PI05Loss, "forward", lambda args, loss: loss.item()),
        "optimizer": (TrainableOptimizer, "step", lambda args, result: result[0].item()),
        "window": (DeviceMetrics, "add_step", lambda args, _: args[1].loss.item()),
    }

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, gradient):
            gradient.item()
            return gradient

    def beside(name, original, look):
        def replacement(*args, **options):
            result = original(*args, **options)
            look((*args, *options.values()), result)
            return Identity.apply(result) if name == "forward" else result

        return replacement

    def copies(batches, device, *rest, prefetcher=feed.cuda_prefetcher):
        for batch in prefetcher(batches, device, *rest):
            batch["action"].sum().item()
            yield batch

    monkeypatch.setattr(feed, "cuda_prefetcher", copies)
    for name, (owner, attribute, look) in looks.items():
        monkeypatch.setattr(owner, attribute, beside(name, getattr(owner, attribute), look))
    times = {"noise": 1, "copies": 2, "images": 2, "forward": 2, "backward": 2, "optimizer": 1, "window": 1}
    assert by_name(audit_syncs.audit(run), {name: look for name, (_, _, look) in looks.items()}) == times


def test_unpinned_host_batches_are_reported(run, monkeypatch, one_step):
    collate = NumpyToTorchCollate.__call__
    monkeypatch.setattr(NumpyToTorchCollate, "__call__", lambda _, batch: collate(NumpyToTorchCollate(False), batch))
    report = audit_syncs.audit(run).syncs
    assert {(Path(sync.where.file).name, sync.where.function) for sync in report} == {
        ("util.py", "cuda_prefetcher.<locals>.fetch")
    }
    assert all("not pinned" in sync.operation for sync in report)


@pytest.mark.gate
def test_known_syncs_of_lerobot_forward_are_reported(run, monkeypatch, one_step):
    monkeypatch.setattr(PI05Loss, "forward", lambda self, batch, noise, time: self.policy(self.images(batch))[0])
    monkeypatch.setattr(trainable, "remove_unused", lambda policy: [])  # it uses more than its loss needs
    report = audit_syncs.audit(run)
    assert {(Path(sync.where.file).name, sync.where.source) for sync in report.syncs} == {
        ("flow_matching.py", "return dist.sample((bsize,)).to(device)"),
        ("modeling_pi05.py", "att_masks = torch.tensor(att_masks, dtype=torch.bool, device=pad_masks.device)"),
        ("modeling_pi05.py", "att_masks = torch.tensor(att_masks, dtype=action_emb.dtype, device=action_emb.device)"),
        ("modeling_pi05.py", '"loss_per_dim": losses.mean(dim=[0, 1]).detach().cpu().numpy().tolist(),'),
        ("modeling_pi05.py", 'loss_dict["loss"] = loss.item()'),
    }
    assert {sync.times for sync in report.syncs} == {2}
    assert "lerobot/policies/pi05/modeling_pi05.py:" in report.table()


# --- planted ----------------------------------------------------------------------------------------------


def item(loss):
    loss.item()


def mask(loss):
    return torch.ones(3, dtype=torch.bool, device=loss.device)


PLANTED = {
    "converted": lambda loss: float(loss.detach()),
    "formatted": lambda loss: f"{loss:.3f}",
    "as list": lambda loss: loss.expand(2, 3).tolist(),
    "to the CPU": lambda loss: loss.cpu(),
    "to numpy": lambda loss: loss.detach().cpu().numpy(),
    "copied into host memory": lambda loss: torch.zeros(()).copy_(loss.detach()),
    "branch": lambda loss: 1 if loss > 0 else 2,
    "compared": lambda loss: torch.equal(loss, loss),
    "nonzero": lambda loss: torch.nonzero(loss.expand(3)),
    "masked": lambda loss: loss.expand(3)[mask(loss)].sum(),
    "masked write": lambda loss: operator.setitem(torch.zeros(3, device=loss.device), mask(loss), loss.detach()),
    "masked_select": lambda loss: torch.masked_select(loss.expand(3), mask(loss)),
    "unique": lambda loss: torch.unique(loss.expand(3)),
    "number made there": lambda loss: torch.tensor(0.5, device="cuda"),
    "list made there": lambda loss: torch.tensor([0.5, 1.0], device=loss.device),
    "array sent there": lambda loss: torch.as_tensor(np.ones(3), device=loss.device),
    "pageable": lambda loss: torch.ones(1000).to("cuda"),
    "pageable, not blocking": lambda loss: torch.ones(1000).to("cuda", non_blocking=True),
    "pinned, blocking": lambda loss: torch.ones(1000).pin_memory().to("cuda"),
    "index of the host": lambda loss: torch.zeros(3, device=loss.device)[torch.tensor([0, 1])],
    "scalar of the host in where": lambda loss: torch.where(loss > 0, loss, torch.tensor(0.0)),
    "state of a scaler": lambda loss: (scaler := torch.amp.GradScaler("cuda")).scale(loss) * scaler.get_scale(),
    "printed": lambda loss: print(loss),
    "synchronized": lambda loss: torch.cuda.synchronize(),
}


def plant_all(monkeypatch):
    plant(monkeypatch, lambda loss: [planted(loss) for planted in PLANTED.values()])


def test_planted_syncs_are_reported_with_their_line(run, monkeypatch, one_step):
    plant_all(monkeypatch)
    assert by_name(audit_syncs.audit(run), PLANTED) == dict.fromkeys(PLANTED, 2)


def test_error_after_fake_value_names_last_device_read(setting, run, monkeypatch, one_step, capsys):
    def refuse_nan(loss):
        if torch.isnan(loss):
            raise RuntimeError("not a number")

    plant(monkeypatch, refuse_nan)
    monkeypatch.setattr(audit_syncs, "resolve", lambda config, gpus_found: run)
    assert audit_syncs.main(flags(setting)) == 2
    line = refuse_nan.__code__.co_firstlineno + 1
    place = f"at tests/diagnostics/test_audit_syncs.py:{line}, `if torch.isnan(loss):`"
    assert f"last read a value from the device {place}" in capsys.readouterr().err


def test_syncs_inside_autograd_are_reported(run, monkeypatch, one_step):
    original = PI05Loss.forward

    def forward(self, batch, noise, time):
        loss = original(self, batch, noise, time)
        return loss.expand(3)[torch.ones(3, dtype=torch.bool, device=loss.device)].sum()

    monkeypatch.setattr(PI05Loss, "forward", forward)
    report = audit_syncs.audit(run)
    assert {(sync.where.function, sync.times) for sync in report.syncs} == {(forward.__qualname__, 2), ("backward", 2)}
    assert "  autograd  " in report.table()


def test_asynchronous_operations_are_not_reported(run, monkeypatch, one_step):
    def innocent(loss):
        values, mask = loss.detach().expand(3).clone(), torch.ones(3, dtype=torch.bool, device=loss.device)
        values[mask] = 0.0
        torch.zeros(2, 3, device=loss.device)[1] = 2.0
        values[torch.zeros(2, dtype=torch.int64, device=loss.device)].sum()
        torch.where(mask, 0.0, values)
        values * torch.tensor(2.0)
        torch.full((3,), 0.5, device=loss.device)
        torch.isfinite(values).all()
        torch.ones(10).pin_memory().to("cuda", non_blocking=True)
        values.to("cpu", non_blocking=True)
        values.to(torch.bfloat16)
        print(values.shape, torch.tensor(1.0), torch.ones(3).sum().item(), torch.ones(3).tolist())

    plant(monkeypatch, innocent)
    assert audit_syncs.audit(run).syncs == []


def test_exit_statuses_and_printed_table(setting, run, monkeypatch, one_step, capsys):
    plant(monkeypatch, item)
    monkeypatch.setattr(audit_syncs, "resolve", lambda config, gpus_found: run)  # counts FLOPs with the real loss
    assert audit_syncs.main(flags(setting)) == 1
    table = capsys.readouterr().out
    line = item.__code__.co_firstlineno + 1
    assert f"2      tests/diagnostics/test_audit_syncs.py:{line}  item      a value is read  loss.item()" in table
    assert "The host waits for the device 2 times in 1 steps of 2 micro-batches" in table

    monkeypatch.undo()
    assert audit_syncs.main(["--preset", "nonsense"]) == 2
    assert "--preset nonsense" in capsys.readouterr().err


def test_audit_runs_without_normalisation_statistics(run, monkeypatch, one_step):
    plant(monkeypatch, item)
    stats = {key: {n: v for n, v in values.items() if n != "q01"} for key, values in run.robots[0].stats.items()}
    metas = tuple(replace(meta, stats=stats) for meta in run.rows.metas)
    missing = {"action": {"q01"}, "observation.state": {"q01"}}
    policy = run.policy.select_robot(replace(run.robots[0], stats={}, missing_stats=missing))
    without = replace(run, rows=replace(run.rows, metas=metas), policy=policy)
    assert by_name(audit_syncs.audit(without)) == {"item": 2}


def test_audit_restores_process_state(run, monkeypatch, one_step):
    def patched():
        functions = [torch.Generator, torch.Tensor.backward, torch.cuda.Stream]
        return [*functions, DeviceMetrics.gather, state.build_model, feed.with_timeout]

    before, precision = patched(), torch.get_float32_matmul_precision()
    plant(monkeypatch, item)
    audit_syncs.audit(run)
    assert patched() == before
    assert gc.isenabled() and torch.get_float32_matmul_precision() == precision
    weight = torch.ones(2, requires_grad=True)
    (weight * 2).sum().backward()
    assert weight.grad.tolist() == [2, 2]


# --- with CUDA --------------------------------------------------------------------------------------------


def test_cuda_sync_warnings_become_reported_lines(run, monkeypatch, one_step, tmp_path):
    """On the CPU, with PyTorch's warning raised by hand."""

    def synchronise():
        warnings.warn(f"{audit_syncs.CUDA_WARNING} (Triggered internally at CUDAFunctions.cpp)", stacklevel=1)

    def waits(loss):
        synchronise()
        warnings.warn("something else", stacklevel=1)

    modes = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    plant(monkeypatch, waits)
    with pytest.warns(UserWarning, match="something else"):
        report = audit_syncs._audit_on(audit_syncs._shortened(run, str(tmp_path)), CPU)
    assert by_name(report) == {"synchronise": 2}
    assert modes == ["warn", 0]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["heads", "full"])
def test_training_loop_has_no_syncs_on_gpu(setting, mode, capsys):
    status = audit_syncs.main(flags(setting, **{"train.mode": mode}))
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "Looked at  the whole step on NVIDIA" in printed


@pytest.mark.gpu
def test_planted_syncs_are_reported_on_gpu(setting, monkeypatch, one_step):
    run = resolve(parse_args(flags(setting)), gpus_found=1)
    plant_all(monkeypatch)
    assert not PLANTED.keys() - by_name(audit_syncs.audit(run), PLANTED).keys()


@pytest.mark.parametrize("watching", [audit_syncs._CudaWatch("cpu"), step.HostReads()], ids=["audit", "reads"])
def test_watches_keep_compiled_code_in_use(watching):
    torch._dynamo.reset()
    compiler, calls = Compiler("eager"), []
    layer = compiler(lambda layer, values: layer(values).sum())
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        for watch in (None, watching, None):
            before = compiler.calls
            with watch or contextlib.nullcontext():
                layer(torch.nn.Linear(2, 2), torch.ones(1, 2)).backward()
            calls.append(compiler.calls - before)
    torch._dynamo.reset()
    assert calls == [1, 1, 1]
