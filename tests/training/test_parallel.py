"""Parameters in parts, on two processes: the same losses as with copies, really in parts, and back from the disk."""

import itertools
import json
import multiprocessing
import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from unittest import mock

import pytest
import ray.train.collective
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from diagnostics import compare_strategies
from diagnostics.compare_strategies import StrategiesReport
from diagnostics.environment import Environment
from diagnostics.page import page
from diagnostics.step_clock import StepClock
from tests import in_process
from util import accumulating, make_trainable_optimizer, train_step, whole
from vla_finetuning.config import parse_args
from vla_finetuning.run.checkpoint import load_checkpoint
from vla_finetuning.run.folder import start_attempt
from vla_finetuning.training import parallel, worker
from vla_finetuning.training.memory import Alive, step_memory
from vla_finetuning.training.parallel import spread

CPU = torch.device("cpu")
STRATEGIES = ("ddp", "fsdp2", "fsdp2_reshard")
SAVED_STEPS = 2


def processes(function, *args, world):
    """`function(rank, world, *args)` in so many processes, which are forked from one that has imported everything."""
    multiprocessing.set_forkserver_preload([__name__])
    torch.multiprocessing.start_processes(function, (world, *args), nprocs=world, start_method="forkserver")


def meet(rank, world, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{world}", rank=rank, world_size=world)


class Trainer:
    """What `vla.train` makes of a run, without data and Ray."""

    def __init__(self, run, strategy, rank, world):
        self.run = run
        self.loss, self.autocast = worker.build_model(run, CPU)
        self.model = spread(self.loss, strategy, CPU, world, autocast=self.autocast)
        self.optimizer = worker.build_optimizer(run, self.loss)
        self.dealt = compare_strategies.Dealt(run.config.batch_size, run.block_rows, rank, world, run.batches_per_step)

    def batches(self, count):
        host = compare_strategies.host_batches(self.run, self.dealt, count)
        return list(worker.policy_batches(self.run, host, self.dealt))

    def step(self, number, batches):
        return train_step(
            self.model,
            self.optimizer,
            iter(batches),
            step=number,
            grad_accum=len(batches),
            mean_over=self.run.batches_per_step / self.dealt.world,
            draws=worker.noise_for(self.run, number, self.dealt, CPU),
            autocast=self.autocast,
            device=CPU,
        )

    def backward(self, batch):
        with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
            loss = self.model(batch, *worker.noise_for(self.run, 0, self.dealt, CPU)(0))
        loss.backward()

    def restored(self):
        context = SimpleNamespace(get_world_rank=lambda: self.dealt.rank)
        with (
            mock.patch.object(ray.train, "get_context", lambda: context),
            mock.patch.object(ray.train.collective, "broadcast_from_rank_zero", broadcast),
        ):
            progress, checkpoint = worker.saved_progress(self.run)
        if checkpoint is not None:
            load_checkpoint(checkpoint, self.optimizer.named(), self.optimizer.state())
        return progress

    def everything(self):
        """What trains and Adam's state, whole; all ranks must ask."""
        return {name: whole(t).clone() for name, t in {**self.optimizer.named(), **self.optimizer.state()}.items()}


def broadcast(value):
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def in_parts(module):
    return [isinstance(p, DTensor) for p in module.parameters() if p.requires_grad]


# ---- two processes ------------------------------------------------------------------------------------------------


def two(rank, world, run, folder):
    """What each of the two processes does; it leaves what it found in a file."""
    meet(rank, world, folder)
    found = {"result": compare_strategies.compare(run, STRATEGIES, 20, rank, 2, CPU).model_dump()}
    for strategy in STRATEGIES:
        found[strategy] = {
            "spread": spread_found(run, strategy, rank),
            "travels": travels(run, strategy, rank),
            "communication": communication_of(run, strategy, rank),
            "nan": step_with_nan(run, strategy, rank),
            "peaks": peaks_of_steps(run, strategy, rank, 2),
            "uneven": uneven_steps(run, strategy, rank) if strategy != "fsdp2_reshard" else None,
            "bf16": losses_of(run, strategy, rank, precision="bf16"),
            "recomputed": losses_of(run, strategy, rank, activation_checkpointing=True),
        }
        save(run, strategy, rank, folder)
    found["full disk"] = full_disk(run, rank, folder)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def spread_found(run, strategy, rank):
    """Who holds what, when."""
    trainer = Trainer(run, strategy, rank, 2)
    if strategy == "ddp":
        return None
    trained = [p for p in trainer.loss.parameters() if p.requires_grad]
    units, during = parallel.units(trainer.loss), []
    last = trainer.loss.policy.model.action_out_proj
    last.register_forward_pre_hook(lambda *_: during.extend(any(in_parts(unit)) for unit in units))
    trainer.backward(trainer.batches(1)[0])
    return {
        "share": sum(p.to_local().numel() for p in trained) / sum(p.numel() for p in trained),
        "units": len(units),
        "in parts at the end of forward": during,
        "in parts between steps": all(in_parts(trainer.loss)),
        "gradients in parts": all(isinstance(p.grad, DTensor) for p in trained),
    }


class Collectives(TorchDispatchMode):
    """Counts collectives by name while it is active."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.seen[func.name().removeprefix("c10d::").strip("_")] += 1
        return func(*args, **(kwargs or {}))


def travels(run, strategy, rank):
    """Collectives of a micro-batch that is not the first, while gradients are accumulated; and of the last one."""
    trainer = Trainer(run, strategy, rank, 2)
    first, second = trainer.batches(2)
    with accumulating(trainer.model):
        trainer.backward(first)
        with Collectives() as between:
            trainer.backward(second)
    with Collectives() as last:
        trainer.backward(first)
    return [mode.seen for mode in (between, last)]


def communication_of(run, strategy, rank):
    """What the profiler's clock says of two steps."""
    trainer = Trainer(run, strategy, rank, 2)
    batches = trainer.batches(2)
    clock = StepClock(["communication"] * 2, 1, CPU)
    for number in clock.steps(range(3), trainer.model):
        trainer.step(number, batches)
    return clock.communication().model_dump()


def step_with_nan(run, strategy, rank):
    """A step in which one rank's loss is NaN: skipped as whose, and what it changed."""
    trainer = Trainer(run, strategy, rank, 2)
    batches = trainer.batches(2)
    if rank == 1:
        batches[0]["action"][0, 0, 0] = torch.nan
    before = {name: value.clone() for name, value in trainer.optimizer.named().items()}
    result = trainer.step(0, batches)
    after = {name: value.clone() for name, value in trainer.optimizer.named().items()}
    return {
        "skipped": result.skipped.item(),
        "then": trainer.step(1, trainer.batches(2)).skipped.item(),
        "unchanged": all(torch.equal(parallel.part(after[n])[0], parallel.part(v)[0]) for n, v in before.items()),
    }


def peaks_of_steps(run, strategy, rank, world):
    """Bytes alive at the worst moment of each of four steps of two micro-batches, besides those batches."""
    trainer = Trainer(run, strategy, rank, 1)
    batches = trainer.batches(2)
    inputs = [tensor for batch in batches for tensor in batch.values()]
    alive, peaks = Alive([*trainer.loss.parameters(), *trainer.loss.buffers(), *inputs]), []
    with alive:
        trainer.model = spread(trainer.loss, strategy, CPU, world, autocast=trainer.autocast)
        trainer.optimizer = worker.build_optimizer(run, trainer.loss)
        for number in range(4):
            alive.peak = alive.bytes
            trainer.step(number, batches)
            peaks.append(alive.peak - sum(tensor.untyped_storage().nbytes() for tensor in inputs))
    return peaks


def uneven_steps(run, strategy, rank):
    """Losses of two steps of three micro-batches, of which rank 0 has two."""
    config = replace(run.config, scaling=replace(run.config.scaling, num_workers=3), grad_accum=1)
    trainer = Trainer(replace(run, config=config, block_rows=config.batch_size), strategy, rank, 2)
    batches, losses = trainer.batches(3), []
    for number in range(2):
        micros = trainer.dealt.micros(number)
        losses.append(trainer.step(number, [batches[micro] for micro in micros]).loss.item())
    return losses


def losses_of(run, strategy, rank, **options):
    config = replace(run.config, train=replace(run.config.train, **options))
    trainer = Trainer(replace(run, config=config), strategy, rank, 2)
    batches = trainer.batches(2)
    return [trainer.step(number, batches).loss.item() for number in range(3)]


def save(run, strategy, rank, folder):
    """A checkpoint after some steps, by the program's own writer; and what it must hold."""
    run = replace(run, config=replace(run.config, output_dir=str(folder / strategy)))
    trainer = Trainer(run, strategy, rank, 2)
    for number in range(SAVED_STEPS):
        trainer.step(number, trainer.batches(2))
    if rank == 0:
        run.checkpoints_dir.mkdir(parents=True)
        start_attempt(run.output_dir, 0, 2)
    dist.barrier()
    with mock.patch.object(ray.train, "report", report):
        writer = worker.CheckpointWriter(run, trainer.optimizer, rank, attempt=0)
        progress = trainer.restored()
        writer.save(replace(progress, step=SAVED_STEPS, rows=SAVED_STEPS * run.config.global_batch_size))
        expected = trainer.everything()
        trainer.step(SAVED_STEPS, trainer.batches(2))  # what is being written does not change any more
        writer.wait()
    if rank == 0:
        save_file(expected, folder / f"{strategy}.safetensors")
    dist.barrier()


def full_disk(run, rank, folder):
    """Rank 1 cannot write its part: what each rank is told, and what is left."""
    run = replace(run, config=replace(run.config, output_dir=str(folder / "full")))
    trainer = Trainer(run, "fsdp2", rank, 2)
    if rank == 0:
        run.checkpoints_dir.mkdir(parents=True)
        start_attempt(run.output_dir, 0, 2)
    dist.barrier()
    told = SimpleQueue()
    with mock.patch.object(ray.train, "report", partial(report, told=told)):
        if rank == 1:
            worker.write_pieces = mock.Mock(side_effect=OSError("no space left"))
        writer = worker.CheckpointWriter(run, trainer.optimizer, rank, attempt=0)
        writer.save(trainer.restored())
        writer.wait()
        error = str(told.get(timeout=60))
    dist.barrier()
    return {"told": error, "left": [path.name for path in run.checkpoints_dir.iterdir()]}


def report(metrics, checkpoint=None, checkpoint_dir_name=None, checkpoint_upload_fn=None, told=None, **_):
    """In place of `ray.train.report`. `told`: takes what goes wrong."""

    def upload():
        try:
            checkpoint_upload_fn(checkpoint, checkpoint_dir_name)
        except OSError as error:
            told.put(error)

    if checkpoint_upload_fn is not None:
        threading.Thread(target=upload).start()


class Branches(torch.nn.Module):
    """Two layers, one of which nothing is computed with."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = (torch.nn.Linear(2, 2, bias=False) for _ in range(2))
        for layer in (self.used, self.unused):
            torch.nn.init.ones_(layer.weight)

    def forward(self, batch, noise, time):
        return self.used(batch["x"]).square().mean()


def steps_of_branches(world):
    """What three steps of two micro-batches, with weight decay, make of them."""
    loss = Branches()
    model = spread(loss, "ddp", CPU, world, find_unused_parameters=True)
    optimizer = make_trainable_optimizer(
        loss, schedule=lambda step: 0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip_norm=1.0
    )
    step = partial(train_step, model, optimizer, grad_accum=2, mean_over=2, autocast=None, device=CPU)
    for number in range(3):
        step(itertools.repeat({"x": torch.ones(1, 2)}), step=number, draws=lambda micro: (None, None))
    return {
        "weights": {name: value.tolist() for name, value in optimizer.named().items()},
        "state of": [name for name, param in loss.named_parameters() if optimizer.optimizer.state.get(param)],
    }


def unused_in_ddp(rank, world, folder):
    meet(rank, world, folder)
    (folder / f"{rank}.json").write_text(json.dumps(steps_of_branches(world)))
    dist.destroy_process_group()


def load_everywhere(rank, world, run, folder):
    """Every checkpoint, under every strategy: the names of what is not as it was saved."""
    if world > 1:
        meet(rank, world, folder)
    different = []
    for saved in STRATEGIES:
        expected = load_file(folder / f"{saved}.safetensors")
        of_it = replace(run, config=replace(run.config, output_dir=str(folder / saved)))
        for strategy in STRATEGIES:
            trainer = Trainer(of_it, strategy, rank, world)
            progress = trainer.restored()
            assert progress.step == SAVED_STEPS
            found = trainer.everything()
            assert found.keys() == expected.keys()
            different += [f"{saved} as {strategy}: {n}" for n in found if not torch.equal(found[n], expected[n])]
    if world > 1:
        (folder / f"loaded-{rank}.json").write_text(json.dumps(different))
        dist.destroy_process_group()
    return different


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    setting = in_process.make_setting(folder)
    run = in_process.resolved(setting, **{"scaling.num_workers": 2, "steps": 23, "lr": 1e-3, "warmup_frac": 0})
    processes(two, run, folder, world=2)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return SimpleNamespace(run=run, setting=setting, folder=folder, ranks=ranks)


def test_losses_are_those_of_copies(found):
    for rank in found.ranks:
        ddp, *others = [s["losses"] for s in rank["result"]["spreadings"]]
        assert len(ddp) == 23 and sum(ddp[-5:]) < 0.9 * sum(ddp[:5])
        for losses in others:
            # Sums in another order; Adam makes more of that with every step.
            assert losses == pytest.approx(ddp, rel=1e-3)
            assert losses[:3] == pytest.approx(ddp[:3], rel=1e-5)


@pytest.mark.parametrize("options, within", [("bf16", 2e-3), ("recomputed", 1e-5), ("uneven", 1e-5)])
def test_losses_are_those_of_copies_with(found, options, within):
    for rank in found.ranks:
        ddp = rank["ddp"][options]
        assert len(set(ddp)) == len(ddp)
        for strategy in ("fsdp2", "fsdp2_reshard"):
            if rank[strategy][options] is not None:
                assert rank[strategy][options] == pytest.approx(ddp, rel=within)


def test_parameters_are_in_parts_between_steps(found):
    for rank in found.ranks:
        for strategy in ("fsdp2", "fsdp2_reshard"):
            seen = rank[strategy]["spread"]
            assert seen["in parts between steps"] and seen["gradients in parts"]
            assert seen["share"] == pytest.approx(0.5, abs=0.02)
        ddp, *others = [s["state_bytes"] for s in rank["result"]["spreadings"]]
        assert all(held < 0.6 * ddp for held in others)


def test_units_are_gathered_and_given_up_one_at_a_time(found):
    """Their hooks fire: at the end of forward they are whole in one strategy, in parts again in the other."""
    for rank in found.ranks:
        # Two layers: MLPs of the expert's, and of the language model's that is used; the vision tower's; the words.
        assert rank["fsdp2"]["spread"]["units"] == 2 + 1 + 2 + 1
        assert rank["fsdp2"]["spread"]["in parts at the end of forward"] == [False] * 6
        # The innermost is the expert's last, which may be kept for the backward that follows at once.
        assert sum(rank["fsdp2_reshard"]["spread"]["in parts at the end of forward"]) >= 5


def test_accumulating_sends_no_gradients(found):
    """And ddp and fsdp2 nothing at all, so that ranks may have unequally many micro-batches."""
    for rank in found.ranks:
        between, last = zip(*(rank[strategy]["travels"] for strategy in STRATEGIES), strict=True)
        units = rank["fsdp2"]["spread"]["units"]
        # Units and the rest; each unit is gathered for forward and for backward.
        assert between == ({}, {}, {"allgather_base": 1 + 2 * units})
        assert last[1:] == ({"reduce_scatter_base": 1 + units}, {**between[2], "reduce_scatter_base": 1 + units})


def test_the_profiler_sees_what_travels_under_every_strategy(found):
    """Gloo's: DDP's buckets travel while backward goes on; FSDP2 without streams waits for each collective."""
    for rank in found.ranks:
        for strategy in STRATEGIES:
            seen = rank[strategy]["communication"]
            assert len(seen["total_s"]) == 2 and min(seen["total_s"]) > 0
            for total, hidden in zip(seen["total_s"], seen["hidden_s"], strict=True):
                assert 0 <= hidden <= total


def test_a_rank_whose_loss_is_not_finite_has_all_skip_the_step(found):
    for rank in found.ranks:
        for strategy in STRATEGIES:
            assert rank[strategy]["nan"] == {"skipped": 1.0, "then": 0.0, "unchanged": True}


def test_ddp_holds_one_copy_of_the_gradients(found):
    """As much as one process alone, but for the step in which DDP makes its buckets anew, in the order of backward."""
    alone = peaks_of_steps(found.run, "ddp", 0, 1)
    for rank in found.ranks:
        first, _, *others = rank["ddp"]["peaks"]
        assert first <= 1.01 * alone[0]
        assert others == pytest.approx(alone[2:], rel=0.01)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_plan_foretells_what_processes_hold(found, strategy):
    planned = step_memory(
        found.run.policy_config,
        "full",
        cameras=len(found.run.match.camera_keys),
        batch_size=found.run.config.batch_size,
        grad_accum=2,
        draws=1,
        bf16=False,
        attention="sdpa",
        checkpointing=False,
        strategy=strategy,
        workers=2,
    )
    for rank in found.ranks:
        assert max(rank[strategy]["peaks"][1:]) == pytest.approx(planned.peak, rel=0.05)


def test_what_no_process_has_a_gradient_for_is_left_alone(tmp_path):
    """Where DDP searches for such: neither decayed, nor given Adam's moments, as in one process."""
    processes(unused_in_ddp, tmp_path, world=2)
    expected = steps_of_branches(1)
    assert expected["weights"]["unused.weight"] == Branches().unused.weight.tolist()
    assert expected["weights"]["used.weight"] != Branches().used.weight.tolist()
    assert expected["state of"] == ["used.weight"]
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == expected


def test_a_part_that_cannot_be_written_fails_the_checkpoint_for_all(found):
    for rank in found.ranks:
        assert rank["full disk"] == {"told": "no space left", "left": []}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_is_safetensors_of_each_who_holds_a_part(found, strategy):
    files = sorted(p.name for p in (found.folder / strategy / "checkpoints" / "step_00000002").iterdir())
    parts = [""] if strategy == "ddp" else ["-00001-of-00002", "-00002-of-00002"]
    kinds = [f"{kind}{part}.safetensors" for kind in ("optimizer", "trainable") for part in parts]
    assert files == sorted(["state.json", *kinds])


def test_checkpoints_load_in_one_process(found):
    assert load_everywhere(0, 1, found.run, found.folder) == []


def test_checkpoints_load_in_three_processes_under_any_strategy(found):
    processes(load_everywhere, found.run, found.folder, world=3)
    for rank in range(3):
        assert json.loads((found.folder / f"loaded-{rank}.json").read_text()) == []


def test_the_export_is_what_the_last_checkpoint_holds(found):
    config = replace(found.run.config, output_dir=str(found.folder / "fsdp2"))
    run = replace(found.run, steps=SAVED_STEPS, config=config)
    worker.export(run, Trainer(run, "ddp", 0, 1).optimizer)
    exported = load_file(run.output_dir / "pretrained_model" / "model.safetensors")
    expected = load_file(found.folder / "fsdp2.safetensors")
    trained = [name for name in exported if name in expected]
    assert len(trained) > 30 and all(torch.equal(exported[name], expected[name]) for name in trained)
    # What no training process held is there too, to the bit.
    base = load_file(run.policy_folder / "model.safetensors")
    others = exported.keys() - set(trained)
    assert len(others) == 9 and all("lm_head" in name or "language_model" in name for name in others)
    assert exported.keys() == base.keys() and all(torch.equal(exported[name], base[name]) for name in others)
    with pytest.raises(RuntimeError, match="no checkpoint of the last step, 23: nothing to export"):
        worker.export(replace(run, steps=23), Trainer(run, "ddp", 0, 1).optimizer)


# ---- one process --------------------------------------------------------------------------------------------------


def test_one_process_has_nothing_to_spread():
    loss = torch.nn.Linear(2, 2)
    assert spread(loss, "fsdp2", CPU, 1) is loss


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--scaling.strategy=zero3"], "expected one of ddp, fsdp2, fsdp2_reshard"),
        (["--scaling.strategy=fsdp2", "--train.compile"], "cannot be compiled: leave --train.compile out"),
        (["--scaling.strategy=fsdp2_reshard", "--scaling.num_workers=1,2"], "use a fixed number of workers"),
    ],
)
def test_what_does_not_go_together_is_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        parse_args(["--preset=demo", *flags])


@pytest.mark.parametrize("per_row, largest", [(10, 80), (300, 2), (900, 0)])
def test_the_largest_batch_is_found_without_running_out_of_memory(per_row, largest):
    """Of 1000 bytes 950 may be used; 100 are taken anyway, and 50 by any number of rows."""

    def peak_of(rows):
        peak = 100 + (50 if rows else 0) + per_row * rows
        assert rows <= 1 or peak <= 1000, "out of memory"
        return peak

    found, peaks = compare_strategies.fill(peak_of, 1000)
    assert found == largest
    assert peaks[found] <= 950 and peaks == {rows: peak_of(rows) for rows in peaks}


def test_the_table_and_the_options(found, capsys, monkeypatch):
    results = [compare_strategies.RankStrategies.model_validate(rank["result"]) for rank in found.ranks]
    report = StrategiesReport(
        environment=Environment.here(),
        config=found.run.config.to_json(),
        world_size=2,
        global_batch_size=found.run.config.global_batch_size,
        ranks=results,
    )
    lines = compare_strategies.table(report).splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.startswith(STRATEGIES)}
    assert list(rows) == list(STRATEGIES)
    assert rows["ddp"][3] == "1.00x" and float(rows["ddp"][-1]) == 0 < float(rows["fsdp2"][-1]) < 1e-3
    drawn = page("Strategies", "two cores", compare_strategies.charts(report), "")
    assert drawn.count("<rect") == 3 * 20
    monkeypatch.setenv("STRATEGIES", "fsdp2,ddp")
    monkeypatch.setenv("COMPARE_STEPS", "3")
    options = compare_strategies.parse_options([])[0]
    assert (options.strategies, options.compare_steps) == (["fsdp2", "ddp"], 3)
    assert compare_strategies.main(["--strategies=zero3"]) == 2
    assert "'zero3' is none of ddp, fsdp2, fsdp2_reshard" in capsys.readouterr().err
    assert compare_strategies.main(in_process.flags(found.setting)) == 2
    assert "give at least 2" in capsys.readouterr().err
