"""Sharded parameters on two and four processes: losses against DDP, what each rank stores, checkpoints and exports."""

import itertools
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from diagnostics import compare_strategies
from tests import in_process
from tests.in_process import CPU, Rank, in_ranks, schedule
from util import accumulating, full_tensor, make_trainable_optimizer, train_step
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.options.peft import PeftOptions
from vla_finetuning.plan.resolve import with_config
from vla_finetuning.policies.compiling import Compiler
from vla_finetuning.run.attempts import start_attempt
from vla_finetuning.run.checkpoint import load_checkpoint
from vla_finetuning.training import checkpoint_writer, model, parallel
from vla_finetuning.training.checkpoint_writer import CheckpointWriter
from vla_finetuning.training.export import export, exported_checkpoint
from vla_finetuning.training.feed import policy_batches
from vla_finetuning.training.held_out import HeldOutLoss
from vla_finetuning.training.memory import Alive, step_memory
from vla_finetuning.training.model import build_model, build_optimizer
from vla_finetuning.training.parallel import replicas_on, spread
from vla_finetuning.training.state import noise_for, saved_progress

STRATEGIES = ("ddp", "fsdp2", "fsdp2_reshard")
# fsdp2 and fsdp2_reshard differ only in when they gather parameters; one is enough for all else.
SAVED = ("ddp", "fsdp2_reshard")
SAVED_STEPS = 2
AVERAGED = {"ema.enable": "true", "ema.decay": 0.75}
RECOMPUTED = {"precision": "bf16", "activation_checkpointing": True}


class Trainer:
    """Model, optimizer and schedule of a run, as `vla.train` builds them."""

    def __init__(self, run, strategy, rank, world):
        self.run = run
        self.loss, self.autocast = build_model(run.policy, CPU)
        copies = replicas_on([rank // 2 for rank in range(world)], None) if strategy == "hsdp" else None
        self.model = spread(self.loss, strategy, CPU, world, replicas=copies, autocast=self.autocast)
        self.optimizer = build_optimizer(run.policy, self.loss, run.job.steps)
        self.schedule = schedule(run, rank, world)

    def batches(self, count):
        host = compare_strategies.host_batches(self.run, self.schedule, count)
        return list(policy_batches(host, self.run.policy.config))

    def step(self, number, batches):
        return train_step(
            self.model,
            self.optimizer,
            iter(batches),
            step=number,
            grad_accum=len(batches),
            mean_over=self.run.job.batches_per_step / self.schedule.world,
            draws=noise_for(self.run.policy, number, self.schedule, CPU),
            autocast=self.autocast,
            device=CPU,
        )

    def backward(self, batch):
        with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
            loss = self.model(batch, *noise_for(self.run.policy, 0, self.schedule, CPU)(0))
        loss.backward()

    def load(self):
        progress, checkpoint = saved_progress(self.run.job, Rank(self.schedule.rank, self.schedule.world))
        if checkpoint is not None:
            optimizer = self.optimizer
            load_checkpoint(checkpoint, optimizer.named(), optimizer.state(), optimizer.named_average())
        return progress

    def tensors(self):
        """Gather weights, Adam's state and the average; all ranks must call it."""
        optimizer = self.optimizer
        tensors = {**optimizer.named(), **optimizer.state(), **optimizer.named_average()}
        return {name: full_tensor(tensor).clone() for name, tensor in tensors.items()}


def is_sharded(module):
    return [isinstance(p, DTensor) for p in module.parameters() if p.requires_grad]


# ---- two processes ------------------------------------------------------------------------------------------------


def two_ranks(rank, world, run, folder):
    """Measure all that the tests of two processes compare, by strategy."""
    results = {"comparison": compare_strategies.compare(run, STRATEGIES, 9, Rank(rank, 2)).model_dump()}
    for strategy in STRATEGIES:
        results[strategy] = {
            "sharding": sharding_of(run, strategy, rank),
            "collectives": collectives_of(run, strategy, rank),
            "peaks": peaks_of_steps(run, strategy, rank),
        }
        if strategy != "fsdp2_reshard":
            results[strategy]["uneven"] = uneven_steps(run, strategy, rank)
        if strategy in SAVED:
            results[strategy] |= {
                "recomputed in bf16": losses_of(run, strategy, rank, **RECOMPUTED),
                "average": average_of(run, strategy, rank),
                "held_out": held_out_of(run, strategy, rank),
                "adapters": losses_of(run, strategy, rank, adapters=True),
            }
            save(run, strategy, rank, folder)
    results["full disk"] = full_disk(run, rank, folder)
    return results


def sharding_of(run, strategy, rank):
    """Measure what a rank stores in shards, and when."""
    trainer = Trainer(run, strategy, rank, dist.get_world_size())
    if strategy == "ddp":
        return None
    trained = [p for p in trainer.loss.parameters() if p.requires_grad]
    units, during = parallel.units(trainer.loss), []
    last = trainer.loss.policy.model.action_out_proj
    last.register_forward_pre_hook(lambda *_: during.extend(any(is_sharded(unit)) for unit in units))
    trainer.backward(trainer.batches(1)[0])
    return {
        "share": sum(p.to_local().numel() for p in trained) / sum(p.numel() for p in trained),
        "units": len(units),
        "at the end of forward": during,
        "between steps": all(is_sharded(trainer.loss)),
        "gradients": all(isinstance(p.grad, DTensor) for p in trained),
    }


class Collectives(TorchDispatchMode):
    """Counts collectives by name while it is active."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func.name().removeprefix("c10d::").strip("_")] += 1
        return func(*args, **(kwargs or {}))


def collectives_of(run, strategy, rank):
    """Count collectives of an accumulated micro-batch after the first, and of the last one."""
    trainer = Trainer(run, strategy, rank, dist.get_world_size())
    first, second = trainer.batches(2)
    with accumulating(trainer.model):
        trainer.backward(first)
        with Collectives() as between:
            trainer.backward(second)
    with Collectives() as last:
        trainer.backward(first)
    return [mode.counts for mode in (between, last)]


def peaks_of_steps(run, strategy, rank):
    """Return the peak bytes of each of three steps of two micro-batches, without one of the batches."""
    trainer = Trainer(run, strategy, rank, 1)
    batches = trainer.batches(2)
    inputs = [tensor for batch in batches for tensor in batch.values()]
    alive, peaks = Alive([*trainer.loss.parameters(), *trainer.loss.buffers(), *inputs]), []
    with alive:
        trainer.model = spread(trainer.loss, strategy, CPU, 2, autocast=trainer.autocast)
        trainer.optimizer = build_optimizer(run.policy, trainer.loss, run.job.steps)
        for number in range(3):
            alive.peak = alive.bytes
            trainer.step(number, batches)
            peaks.append(alive.peak - sum(tensor.untyped_storage().nbytes() for tensor in batches[1].values()))
    return peaks


def uneven_steps(run, strategy, rank):
    """Return losses of two steps of three micro-batches, two of them on rank 0."""
    config = replace(run.config, scaling=replace(run.config.scaling, num_workers=3), grad_accum=1)
    run = with_config(run, config)
    run = replace(run, rows=replace(run.rows, order=replace(run.rows.order, block_rows=config.batch_size)))
    trainer = Trainer(run, strategy, rank, 2)
    batches, losses = trainer.batches(3), []
    for number in range(2):
        micros = trainer.schedule.micros(number)
        losses.append(trainer.step(number, [batches[micro] for micro in micros]).loss.item())
    return losses


def losses_of(run, strategy, rank, adapters=False, **options):
    peft = PeftOptions(method_type="lora" if adapters else None)
    config = replace(run.config, train=replace(run.config.train, **options), peft=peft)
    trainer = Trainer(with_config(run, config), strategy, rank, 2)
    batches = trainer.batches(2)
    return [trainer.step(number, batches).loss.item() for number in range(3)]


def held_out_of(run, strategy, rank, world=2):
    """Measure held-out losses before and after a step, and whether they change training."""
    run = replace(run, rows=replace(run.rows, eval_episodes=(np.array([0, 2]),)))
    trainer = Trainer(run, strategy, rank, world)
    batches = trainer.batches(4 // world)
    with in_process.tasks_here():
        held_out = HeldOutLoss(run, Rank(rank, world))
        before = held_out.evaluate(trainer.loss, trainer.autocast)
        sharded_again = all(is_sharded(trainer.loss))
        losses = [trainer.step(0, batches).loss.item()]
        after = held_out.evaluate(trainer.loss, trainer.autocast)
        losses.append(trainer.step(1, batches).loss.item())
    undisturbed = Trainer(run, strategy, rank, world)
    expected = [undisturbed.step(number, batches).loss.item() for number in range(2)]
    return {"measured": [before, after], "disturbed": losses != expected, "sharded": sharded_again}


def average_of(run, strategy, rank):
    """Compare the average after four steps, one of them skipped, with numpy's."""
    trainer = Trainer(run, strategy, rank, 2)
    optimizer = trainer.optimizer

    def weights():
        return {name: full_tensor(param).detach().double().numpy() for name, param in optimizer.named().items()}

    start = expected = weights()
    for number in range(4):
        batches = trainer.batches(2)
        if number == 2:
            batches[0]["action"][0, 0, 0] = torch.nan
        trainer.step(number, batches)
        if number != 2:
            expected = {name: 0.75 * expected[name] + 0.25 * value for name, value in weights().items()}
    named = zip(optimizer.names, optimizer.average, strict=True)
    average = {name: full_tensor(tensor).double().numpy() for name, tensor in named}
    last = weights()
    with optimizer.averaged():
        swapped = all(np.array_equal(value, average[name]) for name, value in weights().items())
    return {
        "difference": max(float(np.abs(average[name] - expected[name]).max()) for name in average),
        "change": max(float(np.abs(average[name] - start[name]).max()) for name in average),
        "swapped": swapped,
        "restored": all(np.array_equal(value, last[name]) for name, value in weights().items()),
        "sharded": all(isinstance(tensor, DTensor) for tensor in optimizer.average),
    }


def compiled_losses(rank, world, run):
    torch._dynamo.reset()
    compiler = Compiler("aot_eager")
    with mock.patch.multiple(model, why_not=lambda device: None, Compiler=lambda: compiler):
        losses = losses_of(run, "fsdp2_reshard", rank, compile=True, **RECOMPUTED)
    return {"losses": losses, "compilations": compiler.compilations}


def save(run, strategy, rank, folder):
    """Write a checkpoint with the program's writer, and a file of the tensors that it must have."""
    run = with_config(run, replace(run.config, output_dir=str(folder / strategy)))
    world = dist.get_world_size()
    trainer = Trainer(run, strategy, rank, world)
    batches = trainer.batches(run.job.batches_per_step // world)
    for number in range(SAVED_STEPS):
        trainer.step(number, batches)
    if rank == 0:
        run.job.checkpoints_dir.mkdir(parents=True)
        start_attempt(run.job.output_dir, 0, world)
    dist.barrier()
    writer = CheckpointWriter(run.job, trainer.optimizer, Rank(rank, world), attempt=0)
    progress = trainer.load()
    writer.save(replace(progress, step=SAVED_STEPS, rows=SAVED_STEPS * run.config.global_batch_size))
    expected = trainer.tensors()
    trainer.step(SAVED_STEPS, batches)  # must not change the checkpoint
    writer.wait()
    if rank == 0:
        save_file(expected, folder / f"{strategy}.safetensors")
    dist.barrier()


def full_disk(run, rank, folder):
    """Return the error of each rank and the files that remain if rank 1 cannot write its shard."""
    run = with_config(run, replace(run.config, output_dir=str(folder / "full")))
    trainer = Trainer(run, "fsdp2", rank, 2)
    if rank == 0:
        run.job.checkpoints_dir.mkdir(parents=True)
        start_attempt(run.job.output_dir, 0, 2)
    dist.barrier()
    worker = Rank(rank, 2)
    if rank == 1:
        checkpoint_writer.write_pieces = mock.Mock(side_effect=OSError("no space left"))
    writer = CheckpointWriter(run.job, trainer.optimizer, worker, attempt=0)
    writer.save(trainer.load())
    writer.wait()
    error = str(worker.errors.get(timeout=60))
    dist.barrier()
    return {"message": error, "left": [path.name for path in run.job.checkpoints_dir.rglob("*.*")]}


class Branches(torch.nn.Module):
    """Two layers, one of them unused."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = (torch.nn.Linear(2, 2, bias=False) for _ in range(2))
        for layer in (self.used, self.unused):
            torch.nn.init.ones_(layer.weight)

    def forward(self, batch, noise, time):
        return self.used(batch["x"]).square().mean()


def steps_of_branches(rank, world):
    """Take three steps of two micro-batches with weight decay."""
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


def four_ranks(rank, world, run, folder):
    """Measure what the tests of four processes on two simulated nodes compare."""
    accumulated = with_config(run, replace(run.config, grad_accum=2 * run.config.grad_accum))
    results = {}
    for strategy in ("ddp", "hsdp"):
        trainer = Trainer(accumulated, strategy, rank, world)
        batches = trainer.batches(2)
        results[strategy] = {
            "losses": [trainer.step(number, batches).loss.item() for number in range(5)],
            "sharding": sharding_of(run, strategy, rank),
            "collectives": collectives_of(run, strategy, rank),
            "replicas": parallel.replicas(SimpleNamespace(node_rank=rank // 2, world=world, device=CPU), None),
        }
    save(run, "hsdp", rank, folder)
    results["different"] = differences_when_loaded(rank, world, run, folder, ["hsdp"], SAVED)
    return results


def differences_when_loaded(rank, world, run, folder, strategies, saved_under=(*SAVED, "hsdp")):
    """Load each checkpoint under each strategy; return the names of tensors that differ."""
    different = []
    for saved in saved_under:
        expected = load_file(folder / f"{saved}.safetensors")
        saved_run = with_config(run, replace(run.config, output_dir=str(folder / saved)))
        for strategy in strategies:
            trainer = Trainer(saved_run, strategy, rank, world)
            progress = trainer.load()
            assert progress.step == SAVED_STEPS
            loaded = trainer.tensors()
            assert loaded.keys() == expected.keys()
            different += [f"{saved} as {strategy}: {n}" for n in loaded if not torch.equal(loaded[n], expected[n])]
    return different


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    setting = in_process.make_setting(folder)
    options = {"scaling.num_workers": 2, "steps": 12, "lr": 1e-3, "warmup_frac": 0, **AVERAGED}
    run = in_process.resolved(setting, **options)
    ranks = in_ranks(two_ranks, run, folder, world=2)
    return SimpleNamespace(run=run, setting=setting, folder=folder, ranks=ranks)


@pytest.fixture(scope="module")
def results_of_four(results):
    return in_ranks(four_ranks, results.run, results.folder, world=4)


def test_sharded_losses_equal_ddp(results):
    for rank in results.ranks:
        ddp, *sharded = [s["losses"] for s in rank["comparison"]["spreadings"]]
        assert len(ddp) == 12 and sum(ddp[-3:]) < 0.9 * sum(ddp[:3])
        for losses in sharded:
            # The order of sums differs, and Adam amplifies that with each step.
            assert losses == pytest.approx(ddp, rel=1e-3)
            assert losses[:3] == pytest.approx(ddp[:3], rel=1e-5)


@pytest.mark.parametrize("options, within", [("recomputed in bf16", 2e-3), ("uneven", 1e-5), ("adapters", 1e-5)])
def test_sharded_losses_equal_ddp_with_options(results, options, within):
    for rank in results.ranks:
        ddp = rank["ddp"][options]
        assert len(set(ddp)) == len(ddp)
        sharded = [rank[strategy][options] for strategy in STRATEGIES[1:] if options in rank[strategy]]
        assert sharded == [pytest.approx(ddp, rel=within)]


def test_held_out_loss_equals_one_process_and_leaves_training_unchanged(results):
    """With 10 rows in chunks of 2, one rank has two chunks and the other an extra one that does not count."""
    alone = held_out_of(results.run, "ddp", 0, 1)["measured"]
    assert alone[0]["eval_loss"] != alone[1]["eval_loss"]
    for rank in results.ranks:
        for strategy in SAVED:
            result = rank[strategy]["held_out"]
            assert not result["disturbed"] and result["sharded"] == (strategy != "ddp")
            for actual, expected in zip(result["measured"], alone, strict=True):
                for key in ("eval_loss", "eval_loss_by_task", "eval_loss_by_time"):
                    assert actual[key] == pytest.approx(expected[key], rel=1e-5)


@pytest.mark.gate
def test_compiled_sharded_layers_give_uncompiled_losses(results):
    """Units are gathered outside of compiled code, so each kind of layer is compiled once."""
    for rank, actual in zip(results.ranks, in_ranks(compiled_losses, results.run, world=2), strict=True):
        assert actual["losses"] == pytest.approx(rank["fsdp2_reshard"]["recomputed in bf16"], rel=1e-4)
        assert actual["compilations"] == 4


def test_units_are_gathered_one_at_a_time_and_sharded_between_steps(results):
    for rank in results.ranks:
        gathered, resharded = (rank[strategy]["sharding"] for strategy in STRATEGIES[1:])
        for sharding in (gathered, resharded):
            assert sharding["between steps"] and sharding["gradients"]
            assert sharding["share"] == pytest.approx(0.5, abs=0.02)
        # Two layers: MLPs of the expert, and of the used language model's; the vision tower's; the words.
        assert gathered["units"] == 2 + 1 + 2 + 1
        assert gathered["at the end of forward"] == [False] * 6
        # The innermost is the expert's last, which may stay gathered for the backward that follows.
        assert sum(resharded["at the end of forward"]) >= 5
        ddp, *sharded = [s["state_bytes"] for s in rank["comparison"]["spreadings"]]
        assert all(state_bytes < 0.6 * ddp for state_bytes in sharded)


def test_accumulation_sends_no_gradients(results):
    """ddp and fsdp2 send nothing at all, as ranks may differ in micro-batches; fsdp2_reshard reduces to its shards."""
    for rank in results.ranks:
        between, last = zip(*(rank[strategy]["collectives"] for strategy in STRATEGIES), strict=True)
        units = rank["fsdp2"]["sharding"]["units"]
        # Units and the rest; each unit is gathered for forward and for backward.
        whole_step = {"allgather_base": 1 + 2 * units, "reduce_scatter_base": 1 + units}
        assert between == ({}, {}, whole_step)
        assert last[1:] == ({"reduce_scatter_base": 1 + units}, whole_step)


def planned_step(results, strategy, workers=2, shard_workers=None):
    config, rows = results.run.config, results.run.rows
    options = replace(
        config,
        grad_accum=2,
        scaling=replace(config.scaling, strategy=strategy, num_workers=workers),
        train=replace(config.train, mode="full", precision="fp32"),
        ema=replace(config.ema, enable=True),
    )
    frames = {"cameras": len(rows.camera_keys), "frames": rows.frames}
    return step_memory(results.run.policy.config, options, shard_workers=shard_workers, **frames)


def test_planned_peak_equals_measured_peak(results):
    planned = {strategy: planned_step(results, strategy) for strategy in STRATEGIES}
    for rank in results.ranks:
        for strategy in STRATEGIES:
            assert max(rank[strategy]["peaks"][1:]) == pytest.approx(planned[strategy].peak, rel=0.05), strategy
    assert planned_step(results, "hsdp", workers=4, shard_workers=2) == planned["fsdp2"]


def test_ddp_neither_decays_nor_updates_parameters_without_gradients():
    expected = steps_of_branches(0, 1)
    assert expected["weights"]["unused.weight"] == Branches().unused.weight.tolist()
    assert expected["weights"]["used.weight"] != Branches().used.weight.tolist()
    assert expected["state of"] == ["used.weight"]
    assert in_ranks(steps_of_branches, world=2) == [expected] * 2


def test_failed_shard_write_fails_checkpoint_on_all_ranks(results):
    for rank in results.ranks:
        assert rank["full disk"] == {"message": "no space left", "left": []}


@pytest.mark.parametrize("strategy", SAVED)
def test_checkpoint_has_safetensors_of_each_shard(results, strategy):
    checkpoint = results.folder / strategy / "checkpoints" / "step_00000002"
    files = sorted(path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*.*"))
    parts = [""] if strategy == "ddp" else ["-00001-of-00002", "-00002-of-00002"]
    kinds = [f"{kind}{part}.safetensors" for kind in ("average", "optimizer", "trainable") for part in parts]
    assert files == sorted(["state.json", *(f"attempt-00000/{name}" for name in kinds)])


@pytest.mark.gate
def test_hsdp_shards_within_nodes_and_replicates_across_nodes(results, results_of_four):
    for rank in results_of_four:
        ddp, hsdp = rank["ddp"], rank["hsdp"]
        assert len(set(ddp["losses"])) == 5
        assert hsdp["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
        sharding = hsdp["sharding"]
        # Half of everything, not a quarter.
        assert sharding["share"] == pytest.approx(0.5, abs=0.02)
        assert sharding["between steps"] and sharding["gradients"]
        assert sharding["at the end of forward"] == [False] * sharding["units"]
        # Shards of gradients are summed in a node, then across nodes; accumulation sends nothing.
        between, last = hsdp["collectives"]
        parts = 1 + sharding["units"]
        assert between == {} and last == {"reduce_scatter_base": parts, "allreduce": parts}
        assert hsdp["replicas"] == [[0, 1], [2, 3]]
        assert rank["different"] == []
    written = {path.name for path in (results.folder / "hsdp" / "checkpoints" / "step_00000002").rglob("*.safetensors")}
    kinds = ("average", "optimizer", "trainable")
    assert written == {f"{kind}-0000{n}-of-00002.safetensors" for kind in kinds for n in (1, 2)}


@pytest.mark.parametrize(
    "nodes, shard_workers, replicas",
    [
        ([5, 5, 7, 7], None, [[0, 1], [2, 3]]),
        ([0, 1, 0, 1], None, [[0, 2], [1, 3]]),
        ([0] * 4, None, [[0, 1, 2, 3]]),
        ([0] * 4 + [1] * 2, 2, [[0, 1], [2, 3], [4, 5]]),
    ],
)
def test_each_replica_is_on_one_node(nodes, shard_workers, replicas):
    assert replicas_on(nodes, shard_workers) == replicas


@pytest.mark.parametrize(
    "shard_workers, wanted", [(None, "the same number on each"), (2, "a multiple of --scaling.shard_workers=2")]
)
def test_nodes_with_unequal_workers_are_refused(shard_workers, wanted):
    with pytest.raises(ValueError, match=f"the workers are 3 on node 0, 1 on node 1; needs {wanted}"):
        replicas_on([0, 0, 0, 1], shard_workers)


@pytest.mark.gate
@pytest.mark.usefixtures("results_of_four")
def test_checkpoints_load_in_one_and_three_processes_under_any_strategy(results):
    assert differences_when_loaded(0, 1, results.run, results.folder, ["ddp"]) == []
    assert in_ranks(differences_when_loaded, results.run, results.folder, SAVED, world=3) == [[], [], []]


@pytest.mark.parametrize("strategy", SAVED)
def test_average_equals_numpy_average_of_weights_of_each_step(results, strategy):
    for rank in results.ranks:
        average = rank[strategy]["average"]
        assert average["difference"] < 1e-6 and average["change"] > 1e-4
        assert average["swapped"] and average["restored"]
        assert average["sharded"] == (strategy != "ddp")


def export_of(run):
    export(run.policy, exported_checkpoint(run.job, best=False), run.job.output_dir)
    return load_file(run.job.output_dir / "pretrained_model" / "model.safetensors")


def test_export_has_weights_or_average_of_last_checkpoint(results):
    config = replace(results.run.config, output_dir=str(results.folder / "fsdp2_reshard"))
    run = with_config(results.run, config, SAVED_STEPS)
    exported = export_of(run)
    expected = load_file(results.folder / "fsdp2_reshard.safetensors")
    trained = [name for name in exported if name in expected]
    assert len(trained) > 30
    assert all(torch.equal(exported[name], expected[f"average.{name}"]) for name in trained)
    # Parameters that training does not load are exported bit for bit.
    base = load_file(run.policy.folder / "model.safetensors")
    unused = exported.keys() - set(trained)
    assert len(unused) == 9 and all("lm_head" in name or "language_model" in name for name in unused)
    assert exported.keys() == base.keys() and all(torch.equal(exported[name], base[name]) for name in unused)
    exported = export_of(with_config(run, replace(config, ema=replace(config.ema, enable=False))))
    assert all(torch.equal(exported[name], expected[name]) for name in trained)
    with pytest.raises(RuntimeError, match="no checkpoint of the last step, 12: nothing to export"):
        export_of(with_config(run, config, 12))


# ---- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--scaling.strategy=hsdp", "--scaling.num_workers=6", "--scaling.shard_workers=4"], "give a divisor of 6"),
        (["--scaling.strategy=fsdp2_reshard", "--scaling.num_workers=1,2"], "give --scaling.num_workers one number"),
    ],
)
def test_invalid_scaling_options_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        parse_args(["--preset=demo", *flags])


def test_comparison_options_are_read_from_environment_and_checked(results, capsys, monkeypatch):
    monkeypatch.setenv("STRATEGIES", "fsdp2,ddp")
    monkeypatch.setenv("COMPARE_STEPS", "3")
    options = compare_strategies.parse_options([])[0]
    assert (options.strategies, options.compare_steps) == (["fsdp2", "ddp"], 3)
    assert compare_strategies.main(["--strategies=zero3"]) == 2
    assert "'zero3' is none of ddp, fsdp2, fsdp2_reshard" in capsys.readouterr().err
    assert compare_strategies.main(in_process.flags(results.setting)) == 2
    assert "give at least 2" in capsys.readouterr().err
