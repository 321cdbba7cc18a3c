"""Parameters in parts, on two processes and on four: the losses of copies, really in parts, and back from the disk."""

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
# fsdp2 differs from fsdp2_reshard in when it gathers parameters alone: what does not depend on that is tested once.
SAVED = ("ddp", "fsdp2_reshard")
SAVED_STEPS = 2
AVERAGED = {"ema.enable": "true", "ema.decay": 0.75}
RECOMPUTED = {"precision": "bf16", "activation_checkpointing": True}


class Trainer:
    """What `vla.train` makes of a run, without data and Ray."""

    def __init__(self, run, strategy, rank, world):
        self.run = run
        self.loss, self.autocast = build_model(run.policy, CPU)
        copies = replicas_on([rank // 2 for rank in range(world)], None) if strategy == "hsdp" else None
        self.model = spread(self.loss, strategy, CPU, world, replicas=copies, autocast=self.autocast)
        self.optimizer = build_optimizer(run.policy, self.loss, run.job.steps)
        self.dealt = schedule(run, rank, world)

    def batches(self, count):
        host = compare_strategies.host_batches(self.run, self.dealt, count)
        return list(policy_batches(host, self.run.policy.config))

    def step(self, number, batches):
        return train_step(
            self.model,
            self.optimizer,
            iter(batches),
            step=number,
            grad_accum=len(batches),
            mean_over=self.run.job.batches_per_step / self.dealt.world,
            draws=noise_for(self.run.policy, number, self.dealt, CPU),
            autocast=self.autocast,
            device=CPU,
        )

    def backward(self, batch):
        with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
            loss = self.model(batch, *noise_for(self.run.policy, 0, self.dealt, CPU)(0))
        loss.backward()

    def restored(self):
        progress, checkpoint = saved_progress(self.run.job, Rank(self.dealt.rank, self.dealt.world))
        if checkpoint is not None:
            optimizer = self.optimizer
            load_checkpoint(checkpoint, optimizer.named(), optimizer.state(), optimizer.named_average())
        return progress

    def everything(self):
        """What trains, Adam's state and the average, whole; all ranks must ask."""
        optimizer = self.optimizer
        tensors = {**optimizer.named(), **optimizer.state(), **optimizer.named_average()}
        return {name: full_tensor(tensor).clone() for name, tensor in tensors.items()}


def in_parts(module):
    return [isinstance(p, DTensor) for p in module.parameters() if p.requires_grad]


# ---- two processes ------------------------------------------------------------------------------------------------


def two(rank, world, run, folder):
    """What each of the two processes does and finds."""
    found = {"result": compare_strategies.compare(run, STRATEGIES, 9, Rank(rank, 2)).model_dump()}
    for strategy in STRATEGIES:
        found[strategy] = {
            "spread": spread_found(run, strategy, rank),
            "travels": travels(run, strategy, rank),
            "peaks": peaks_of_steps(run, strategy, rank, 2),
        }
        if strategy != "fsdp2_reshard":
            found[strategy]["uneven"] = uneven_steps(run, strategy, rank)
        if strategy in SAVED:
            found[strategy] |= {
                "recomputed in bf16": losses_of(run, strategy, rank, **RECOMPUTED),
                "average": average_of(run, strategy, rank),
                "held out": held_out_of(run, strategy, rank),
                "adapters": losses_of(run, strategy, rank, adapters=True),
            }
            save(run, strategy, rank, folder)
    found["full disk"] = full_disk(run, rank, folder)
    return found


def spread_found(run, strategy, rank):
    """What each rank holds, and when."""
    trainer = Trainer(run, strategy, rank, dist.get_world_size())
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
    trainer = Trainer(run, strategy, rank, dist.get_world_size())
    first, second = trainer.batches(2)
    with accumulating(trainer.model):
        trainer.backward(first)
        with Collectives() as between:
            trainer.backward(second)
    with Collectives() as last:
        trainer.backward(first)
    return [mode.seen for mode in (between, last)]


def peaks_of_steps(run, strategy, rank, world):
    """Bytes alive at the worst moment of each of three steps of two micro-batches, one of those batches left out."""
    trainer = Trainer(run, strategy, rank, 1)
    batches = trainer.batches(2)
    inputs = [tensor for batch in batches for tensor in batch.values()]
    alive, peaks = Alive([*trainer.loss.parameters(), *trainer.loss.buffers(), *inputs]), []
    with alive:
        trainer.model = spread(trainer.loss, strategy, CPU, world, autocast=trainer.autocast)
        trainer.optimizer = build_optimizer(run.policy, trainer.loss, run.job.steps)
        for number in range(3):
            alive.peak = alive.bytes
            trainer.step(number, batches)
            peaks.append(alive.peak - sum(tensor.untyped_storage().nbytes() for tensor in batches[1].values()))
    return peaks


def uneven_steps(run, strategy, rank):
    """Losses of two steps of three micro-batches, of which rank 0 has two."""
    config = replace(run.config, scaling=replace(run.config.scaling, num_workers=3), grad_accum=1)
    run = with_config(run, config)
    run = replace(run, rows=replace(run.rows, order=replace(run.rows.order, block_rows=config.batch_size)))
    trainer = Trainer(run, strategy, rank, 2)
    batches, losses = trainer.batches(3), []
    for number in range(2):
        micros = trainer.dealt.micros(number)
        losses.append(trainer.step(number, [batches[micro] for micro in micros]).loss.item())
    return losses


def losses_of(run, strategy, rank, adapters=False, **options):
    peft = PeftOptions(method_type="lora" if adapters else None)
    config = replace(run.config, train=replace(run.config.train, **options), peft=peft)
    trainer = Trainer(with_config(run, config), strategy, rank, 2)
    batches = trainer.batches(2)
    return [trainer.step(number, batches).loss.item() for number in range(3)]


def held_out_of(run, strategy, rank, world=2):
    """Held-out losses before and after a step, and what that step's loss and the weights then are."""
    run = replace(run, rows=replace(run.rows, eval_episodes=(np.array([0, 2]),)))
    trainer = Trainer(run, strategy, rank, world)
    batches = trainer.batches(4 // world)
    with in_process.tasks_here():
        held_out = HeldOutLoss(run, Rank(rank, world))
        before = held_out.evaluate(trainer.loss, trainer.autocast)
        in_parts_again = all(in_parts(trainer.loss))
        losses = [trainer.step(0, batches).loss.item()]
        after = held_out.evaluate(trainer.loss, trainer.autocast)
        losses.append(trainer.step(1, batches).loss.item())
    undisturbed = Trainer(run, strategy, rank, world)
    expected = [undisturbed.step(number, batches).loss.item() for number in range(2)]
    measured = [{key: value for key, value in found.items() if key != "eval_s"} for found in (before, after)]
    return {"measured": measured, "disturbed": losses != expected, "in parts": in_parts_again}


def average_of(run, strategy, rank):
    """After four steps, of which one is skipped: how far the average is from one computed beside it."""
    trainer = Trainer(run, strategy, rank, 2)
    own = trainer.optimizer

    def weights():
        return {name: full_tensor(param).detach().double().numpy() for name, param in own.named().items()}

    start = expected = weights()
    for number in range(4):
        batches = trainer.batches(2)
        if number == 2:
            batches[0]["action"][0, 0, 0] = torch.nan
        trainer.step(number, batches)
        if number != 2:
            expected = {name: 0.75 * expected[name] + 0.25 * value for name, value in weights().items()}
    found = {name: full_tensor(tensor).double().numpy() for name, tensor in zip(own.names, own.average, strict=True)}
    last = weights()
    with own.averaged():
        swapped = all(np.array_equal(value, found[name]) for name, value in weights().items())
    return {
        "apart": max(float(np.abs(found[name] - expected[name]).max()) for name in found),
        "moved": max(float(np.abs(found[name] - start[name]).max()) for name in found),
        "swapped": swapped,
        "back": all(np.array_equal(value, last[name]) for name, value in weights().items()),
        "in parts": all(isinstance(tensor, DTensor) for tensor in own.average),
    }


def compiled(rank, world, run):
    """Losses with layers compiled, computed again in the backward pass, and how often they were compiled."""
    torch._dynamo.reset()
    compiler = Compiler("aot_eager")
    with mock.patch.multiple(model, why_not=lambda device: None, Compiler=lambda: compiler):
        losses = losses_of(run, "fsdp2_reshard", rank, compile=True, **RECOMPUTED)
    return {"losses": losses, "compilations": compiler.compilations}


def save(run, strategy, rank, folder):
    """A checkpoint after some steps, by the program's own writer; and what it must hold."""
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
    progress = trainer.restored()
    writer.save(replace(progress, step=SAVED_STEPS, rows=SAVED_STEPS * run.config.global_batch_size))
    expected = trainer.everything()
    trainer.step(SAVED_STEPS, batches)  # what is being written does not change any more
    writer.wait()
    if rank == 0:
        save_file(expected, folder / f"{strategy}.safetensors")
    dist.barrier()


def full_disk(run, rank, folder):
    """Rank 1 cannot write its part: the error of each rank, and what is left."""
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
    writer.save(trainer.restored())
    writer.wait()
    error = str(worker.errors.get(timeout=60))
    dist.barrier()
    return {"message": error, "left": [path.name for path in run.job.checkpoints_dir.rglob("*.*")]}


class Branches(torch.nn.Module):
    """Two layers, one of which nothing is computed with."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = (torch.nn.Linear(2, 2, bias=False) for _ in range(2))
        for layer in (self.used, self.unused):
            torch.nn.init.ones_(layer.weight)

    def forward(self, batch, noise, time):
        return self.used(batch["x"]).square().mean()


def steps_of_branches(rank, world):
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


def four(rank, world, run, folder):
    """What each of four processes does, which are on two nodes as far as they know."""
    twice = with_config(run, replace(run.config, grad_accum=2 * run.config.grad_accum))
    found = {}
    for strategy in ("ddp", "hsdp"):
        trainer = Trainer(twice, strategy, rank, world)
        batches = trainer.batches(2)
        found[strategy] = {
            "losses": [trainer.step(number, batches).loss.item() for number in range(5)],
            "spread": spread_found(run, strategy, rank),
            "travels": travels(run, strategy, rank),
            "replicas": parallel.replicas(SimpleNamespace(node_rank=rank // 2, world=world, device=CPU), None),
        }
    save(run, "hsdp", rank, folder)
    found["different"] = different_when_loaded(run, folder, rank, world, SAVED, ["hsdp"])
    return found


def load_everywhere(rank, world, run, folder):
    """Every checkpoint, under every strategy: the names of what is not as it was saved. One process has no parts."""
    return different_when_loaded(run, folder, rank, world, [*SAVED, "hsdp"], SAVED if world > 1 else ["ddp"])


def different_when_loaded(run, folder, rank, world, saved_under, loaded_under):
    different = []
    for saved in saved_under:
        expected = load_file(folder / f"{saved}.safetensors")
        of_it = with_config(run, replace(run.config, output_dir=str(folder / saved)))
        for strategy in loaded_under:
            trainer = Trainer(of_it, strategy, rank, world)
            progress = trainer.restored()
            assert progress.step == SAVED_STEPS
            found = trainer.everything()
            assert found.keys() == expected.keys()
            different += [f"{saved} as {strategy}: {n}" for n in found if not torch.equal(found[n], expected[n])]
    return different


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    setting = in_process.make_setting(folder)
    run = in_process.resolved(
        setting, **{"scaling.num_workers": 2, "steps": 12, "lr": 1e-3, "warmup_frac": 0, **AVERAGED}
    )
    ranks = in_ranks(two, run, folder, world=2)
    return SimpleNamespace(run=run, setting=setting, folder=folder, ranks=ranks)


@pytest.fixture(scope="module")
def of_four(found):
    return in_ranks(four, found.run, found.folder, world=4)


def test_losses_are_those_of_copies(found):
    for rank in found.ranks:
        ddp, *others = [s["losses"] for s in rank["result"]["spreadings"]]
        assert len(ddp) == 12 and sum(ddp[-3:]) < 0.9 * sum(ddp[:3])
        for losses in others:
            # Sums in another order; Adam makes more of that with every step.
            assert losses == pytest.approx(ddp, rel=1e-3)
            assert losses[:3] == pytest.approx(ddp[:3], rel=1e-5)


@pytest.mark.parametrize("options, within", [("recomputed in bf16", 2e-3), ("uneven", 1e-5), ("adapters", 1e-5)])
def test_losses_are_those_of_copies_with(found, options, within):
    for rank in found.ranks:
        ddp = rank["ddp"][options]
        assert len(set(ddp)) == len(ddp)
        sharded = [rank[strategy][options] for strategy in STRATEGIES[1:] if options in rank[strategy]]
        assert sharded == [pytest.approx(ddp, rel=within)]


def test_the_held_out_loss_is_that_of_one_process_and_disturbs_nothing(found):
    """10 rows in chunks of 2: one of the two ranks has two chunks, and computes another that does not count."""
    alone = held_out_of(found.run, "ddp", 0, 1)
    for rank in found.ranks:
        for strategy in SAVED:
            of_it = rank[strategy]["held out"]
            assert not of_it["disturbed"] and of_it["in parts"] == (strategy != "ddp")
            for one, expected in zip(of_it["measured"], alone["measured"], strict=True):
                assert one["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
                assert one["eval_loss_by_task"] == pytest.approx(expected["eval_loss_by_task"], rel=1e-5)
                counted = [value for value in one["eval_loss_by_time"] if value is not None]
                assert counted == pytest.approx([v for v in expected["eval_loss_by_time"] if v is not None], rel=1e-5)
    assert alone["measured"][0]["eval_loss"] != alone["measured"][1]["eval_loss"]


@pytest.mark.gate
def test_compiled_layers_in_parts_give_the_losses_of_layers_that_are_not(found):
    """Units are gathered outside of what is compiled: once for all layers of a kind, however often they come and go."""
    for rank, seen in zip(found.ranks, in_ranks(compiled, found.run, world=2), strict=True):
        assert seen["losses"] == pytest.approx(rank["fsdp2_reshard"]["recomputed in bf16"], rel=1e-4)
        assert seen["compilations"] == 4


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
    """And ddp and fsdp2 nothing at all, so that ranks may have unequally many micro-batches.

    fsdp2_reshard, whose ranks may not, keeps its parts of gradients instead of all of them.
    """
    for rank in found.ranks:
        between, last = zip(*(rank[strategy]["travels"] for strategy in STRATEGIES), strict=True)
        units = rank["fsdp2"]["spread"]["units"]
        # Units and the rest; each unit is gathered for forward and for backward.
        whole_step = {"allgather_base": 1 + 2 * units, "reduce_scatter_base": 1 + units}
        assert between == ({}, {}, whole_step)
        assert last[1:] == ({"reduce_scatter_base": 1 + units}, whole_step)


def test_ddp_holds_one_copy_of_the_gradients(found):
    """As much as one process alone, but for the step in which DDP makes its buckets anew, in the order of backward."""
    alone = peaks_of_steps(found.run, "ddp", 0, 1)
    for rank in found.ranks:
        first, _, *others = rank["ddp"]["peaks"]
        assert first <= 1.01 * alone[0]
        assert others == pytest.approx(alone[2:], rel=0.01)


def planned_step(found, strategy, workers=2, shard_workers=None):
    config, rows = found.run.config, found.run.rows
    options = replace(
        config,
        grad_accum=2,
        scaling=replace(config.scaling, strategy=strategy, num_workers=workers),
        train=replace(config.train, mode="full", precision="fp32"),
        ema=replace(config.ema, enable=True),
    )
    cameras = len(rows.camera_keys)
    return step_memory(
        found.run.policy.config, options, cameras=cameras, frames=rows.frames, shard_workers=shard_workers
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_plan_foretells_what_processes_hold(found, strategy):
    planned = planned_step(found, strategy)
    for rank in found.ranks:
        assert max(rank[strategy]["peaks"][1:]) == pytest.approx(planned.peak, rel=0.05)


def test_a_copy_on_every_node_is_planned_as_one_node_is(found):
    assert planned_step(found, "hsdp", workers=4, shard_workers=2) == planned_step(found, "fsdp2")


def test_what_no_process_has_a_gradient_for_is_left_alone():
    """Where DDP searches for such: neither decayed, nor given Adam's moments, as in one process."""
    expected = steps_of_branches(0, 1)
    assert expected["weights"]["unused.weight"] == Branches().unused.weight.tolist()
    assert expected["weights"]["used.weight"] != Branches().used.weight.tolist()
    assert expected["state of"] == ["used.weight"]
    assert in_ranks(steps_of_branches, world=2) == [expected] * 2


def test_a_part_that_cannot_be_written_fails_the_checkpoint_for_all(found):
    for rank in found.ranks:
        assert rank["full disk"] == {"message": "no space left", "left": []}


@pytest.mark.parametrize("strategy", SAVED)
def test_a_checkpoint_is_safetensors_of_each_who_holds_a_part(found, strategy):
    checkpoint = found.folder / strategy / "checkpoints" / "step_00000002"
    files = sorted(path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*.*"))
    parts = [""] if strategy == "ddp" else ["-00001-of-00002", "-00002-of-00002"]
    kinds = [f"{kind}{part}.safetensors" for kind in ("average", "optimizer", "trainable") for part in parts]
    assert files == sorted(["state.json", *(f"attempt-00000/{name}" for name in kinds)])


@pytest.mark.gate
def test_hsdp_shards_within_a_node_and_copies_across_nodes(found, of_four):
    for rank in of_four:
        ddp, hsdp = rank["ddp"], rank["hsdp"]
        assert len(set(ddp["losses"])) == 5
        assert hsdp["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
        seen = hsdp["spread"]
        # Half of everything, not a quarter.
        assert seen["share"] == pytest.approx(0.5, abs=0.02)
        assert seen["in parts between steps"] and seen["gradients in parts"]
        assert seen["in parts at the end of forward"] == [False] * seen["units"]
        # Parts of gradients are summed in a node, and then over the nodes; while they accumulate, nothing travels.
        between, last = hsdp["travels"]
        assert between == {} and last == {"reduce_scatter_base": 1 + seen["units"], "allreduce": 1 + seen["units"]}
        assert hsdp["replicas"] == [[0, 1], [2, 3]]
    written = {path.name for path in (found.folder / "hsdp" / "checkpoints" / "step_00000002").rglob("*.safetensors")}
    kinds = ("average", "optimizer", "trainable")
    assert written == {f"{kind}-0000{n}-of-00002.safetensors" for kind in kinds for n in (1, 2)}


@pytest.mark.gate
def test_checkpoints_load_under_hsdp(of_four):
    assert [rank["different"] for rank in of_four] == [[]] * 4


@pytest.mark.parametrize(
    "nodes, shard_workers, replicas",
    [
        ([5, 5, 7, 7], None, [[0, 1], [2, 3]]),
        ([0, 1, 0, 1], None, [[0, 2], [1, 3]]),
        ([0] * 4, None, [[0, 1, 2, 3]]),
        ([0] * 4 + [1] * 2, 2, [[0, 1], [2, 3], [4, 5]]),
    ],
)
def test_replicas_are_on_one_node_each(nodes, shard_workers, replicas):
    assert replicas_on(nodes, shard_workers) == replicas


@pytest.mark.parametrize(
    "shard_workers, wanted", [(None, "the same number on each"), (2, "a multiple of --scaling.shard_workers=2")]
)
def test_nodes_with_unequally_many_workers_are_refused(shard_workers, wanted):
    with pytest.raises(ValueError, match=f"the workers are 3 on node 0, 1 on node 1; needs {wanted}"):
        replicas_on([0, 0, 0, 1], shard_workers)


@pytest.mark.gate
@pytest.mark.usefixtures("of_four")
def test_checkpoints_load_in_one_process(found):
    assert load_everywhere(0, 1, found.run, found.folder) == []


@pytest.mark.gate
@pytest.mark.usefixtures("of_four")
def test_checkpoints_load_in_three_processes_under_any_strategy(found):
    assert in_ranks(load_everywhere, found.run, found.folder, world=3) == [[], [], []]


@pytest.mark.parametrize("strategy", SAVED)
def test_the_average_is_that_of_the_weights_of_every_step(found, strategy):
    """Beside it, in numpy, from the weights after each step; in parts of the same sizes as they."""
    for rank in found.ranks:
        assert rank[strategy]["average"]["apart"] < 1e-6 and rank[strategy]["average"]["moved"] > 1e-4
        assert rank[strategy]["average"]["swapped"] and rank[strategy]["average"]["back"]
        assert rank[strategy]["average"]["in parts"] == (strategy != "ddp")


def export_of(run):
    export(run.policy, exported_checkpoint(run.job, best=False), run.job.output_dir)


def test_the_export_is_what_the_last_checkpoint_holds(found):
    """The average of what trained, and without --ema.enable the weights."""
    config = replace(found.run.config, output_dir=str(found.folder / "fsdp2_reshard"))
    run = with_config(found.run, config, SAVED_STEPS)
    export_of(run)
    exported = load_file(run.job.output_dir / "pretrained_model" / "model.safetensors")
    expected = load_file(found.folder / "fsdp2_reshard.safetensors")
    trained = [name for name in exported if name in expected]
    assert len(trained) > 30
    assert all(torch.equal(exported[name], expected[f"average.{name}"]) for name in trained)
    # What no training process held is there too, to the bit.
    base = load_file(run.policy.folder / "model.safetensors")
    others = exported.keys() - set(trained)
    assert len(others) == 9 and all("lm_head" in name or "language_model" in name for name in others)
    assert exported.keys() == base.keys() and all(torch.equal(exported[name], base[name]) for name in others)
    export_of(with_config(run, replace(config, ema=replace(config.ema, enable=False))))
    exported = load_file(run.job.output_dir / "pretrained_model" / "model.safetensors")
    assert all(torch.equal(exported[name], expected[name]) for name in trained)
    with pytest.raises(RuntimeError, match="no checkpoint of the last step, 12: nothing to export"):
        export_of(with_config(run, config, 12))


# ---- one process --------------------------------------------------------------------------------------------------


def test_one_process_has_nothing_to_spread():
    loss = torch.nn.Linear(2, 2)
    assert spread(loss, "fsdp2", CPU, 1) is loss


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--scaling.strategy=zero3"], "expected one of ddp, fsdp2, fsdp2_reshard, hsdp"),
        (["--scaling.strategy=hsdp", "--scaling.num_workers=2,4"], "as many workers as another"),
        (["--scaling.strategy=fsdp2", "--scaling.shard_workers=2"], "is for --scaling.strategy=hsdp"),
        (["--scaling.strategy=hsdp", "--scaling.num_workers=6", "--scaling.shard_workers=4"], "give a divisor of 6"),
        (["--scaling.strategy=fsdp2_reshard", "--scaling.num_workers=1,2"], "use a fixed number of workers"),
    ],
)
def test_what_does_not_go_together_is_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        parse_args(["--preset=demo", *flags])


def test_the_options_of_a_comparison(found, capsys, monkeypatch):
    monkeypatch.setenv("STRATEGIES", "fsdp2,ddp")
    monkeypatch.setenv("COMPARE_STEPS", "3")
    options = compare_strategies.parse_options([])[0]
    assert (options.strategies, options.compare_steps) == (["fsdp2", "ddp"], 3)
    assert compare_strategies.main(["--strategies=zero3"]) == 2
    assert "'zero3' is none of ddp, fsdp2, fsdp2_reshard" in capsys.readouterr().err
    assert compare_strategies.main(in_process.flags(found.setting)) == 2
    assert "give at least 2" in capsys.readouterr().err
