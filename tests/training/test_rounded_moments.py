"""Moments in bfloat16: rounded without bias, as good as float32 ones, and the same on every device and shard."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from tests import in_process
from tests.tiny import make_config
from tests.training.test_parallel import meet, processes
from util import full_tensor, make_trainable_optimizer
from vla_finetuning.flags import parse_args
from vla_finetuning.run.checkpoint import (
    OPTIMIZER,
    TRAINABLE,
    Piece,
    Progress,
    commit,
    load_checkpoint,
    write_pieces,
)
from vla_finetuning.training import rounded_moments
from vla_finetuning.training.memory import step_memory
from vla_finetuning.training.parallel import shard_of
from vla_finetuning.training.rounded_moments import RoundedMoments, Stretch, keys_of, random_bits, round_stochastically

CPU = torch.device("cpu")
OPTIONS = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "clip_norm": 1.0}
MASK = np.uint64(0xFFFFFFFF)


# ---- rounding -------------------------------------------------------------------------------------------------------


def bits_by_numpy(places, key):
    """`random_bits` of places in one parameter, in the arithmetic of unsigned 64-bit integers."""
    x = (places.astype(np.uint64) + np.uint64(key[0])) & MASK
    x ^= x >> np.uint64(16)
    x = (x * np.uint64(0x7FEB352D)) & MASK
    x = (x + np.uint64(key[1])) & MASK
    x ^= x >> np.uint64(15)
    x = (x * np.uint64(0x846CA68B)) & MASK
    return (x ^ (x >> np.uint64(16))).astype(np.uint32)


def bits_of(stretches, keys, device=CPU):
    return random_bits([Stretch(*stretch) for stretch in stretches], keys, device).cpu().numpy().view(np.uint32)


def test_bits_are_those_of_the_place_in_the_parameter():
    keys = keys_of(3, 7, 2)
    # The end of a parameter of more than 2**31 elements, which wraps around, and another's beginning.
    found = bits_of([(1, 0, 10, 2**32 - 5, 0), (0, 0, 7, 0, 12)], keys)
    assert np.array_equal(found[:10], bits_by_numpy(np.arange(2**32 - 5, 2**32 + 5), keys[1]))
    assert np.array_equal(found[12:19], bits_by_numpy(np.arange(7), keys[0]))


@pytest.mark.gpu
def test_bits_on_a_gpu_are_those_on_a_cpu():
    stretches, keys = [(0, 0, 10_001, 2**31 - 7, 0)], keys_of(3, 7, 1)
    assert np.array_equal(bits_of(stretches, keys, torch.device("cuda")), bits_of(stretches, keys))


def test_bits_are_uniform_and_independent_of_neighbours_parameters_and_steps():
    size = 2**16
    one = bits_of([(0, 0, size, 0, 0)], keys_of(0, 0, 2))
    others = {
        "the next element": np.roll(one, 1),
        "the next parameter": bits_of([(1, 0, size, 0, 0)], keys_of(0, 0, 2)),
        "the next step": bits_of([(0, 0, size, 0, 0)], keys_of(0, 1, 2)),
        "the other half": one >> 16 | one << 16,
    }
    as_bits = np.unpackbits(one.view(np.uint8)).astype(float).reshape(size, 32)
    five_sigma = 5 / np.sqrt(size)
    assert np.abs(2 * as_bits.mean(axis=0) - 1).max() < five_sigma
    for name, other in others.items():
        shares = [(values & 0xFFFF) / 2**16 - 0.5 for values in (one, other)]
        assert abs(12 * np.mean(shares[0] * shares[1])) < five_sigma, name
    counts, _ = np.histogram(one & 0xFFFF, bins=256, range=(0, 2**16))
    assert abs(((counts - size / 256) ** 2).sum() / (size / 256) - 255) < 5 * np.sqrt(2 * 255)  # chi-squared


def test_rounding_is_unbiased_to_one_of_two_neighbours():
    draws, generator = 4096, np.random.default_rng(1)
    values = (generator.standard_normal(64) * 10.0 ** generator.integers(-30, 30, 64)).astype(np.float32)
    # numpy has no bfloat16: a float32 whose lower half is zero is one.
    low = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    high = (low.view(np.uint32) + 0x10000).view(np.float32)
    share = (values.astype(float) - low) / (high.astype(float) - low)
    bits = bits_of([(0, 0, 64 * draws, 0, 0)], keys_of(0, 0, 1)).view(np.int32)
    rounded = torch.from_numpy(np.repeat(values, draws))
    round_stochastically(rounded, torch.from_numpy(bits))
    found = rounded.numpy().reshape(64, draws)
    assert ((found == low[:, None]) | (found == high[:, None])).all()
    up = (found == high[:, None]).mean(axis=1)
    sigma = np.sqrt(share * (1 - share) / draws)
    assert (np.abs(up - share) < 5 * sigma + 2**-16).all()
    stays = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-130, float("inf")])
    before = stays.clone()
    round_stochastically(stays, torch.full((6,), 0xFFFF, dtype=torch.int32))
    assert torch.equal(stays, before)


# ---- updates --------------------------------------------------------------------------------------------------------


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(9, 17), nn.Tanh(), nn.Linear(17, 3))

    def forward(self, step):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 9, generator=generator)
        y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin(), x[:, 3:].mean(dim=1)], dim=1)
        return (self.net(x) - y).square().mean()


def optimizer_of(model, seed=0, rounded=True, **options):
    plain = make_trainable_optimizer(model, schedule=lambda step: 3e-3, **OPTIONS | options)
    return RoundedMoments.of(plain, seed) if rounded else plain


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        loss = model(step)
        loss.backward()
        losses.append(loss.item())
        optimizer.step(step)
    return losses


def state_of(model, optimizer):
    return {**copy.deepcopy(model.state_dict()), **copy.deepcopy(optimizer.state())}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_the_loss_falls_as_with_float32_moments():
    found = {}
    for rounded in (False, True):
        model = Regression()
        losses = train(model, optimizer_of(model, rounded=rounded), range(300))
        found[rounded] = np.mean(losses[-50:]), np.mean(losses[:10])
    assert found[True][0] == pytest.approx(found[False][0], rel=0.03) and found[True][0] < 0.75 * found[True][1]


def test_moments_follow_smaller_gradients_where_the_nearest_neighbours_would_not():
    """1 - beta2 is a thousandth: the second moment changes by less than half the distance between neighbours."""
    found = {}
    for name in ("float32", "rounded", "nearest"):
        module = nn.Linear(32, 32, bias=False)
        optimizer = optimizer_of(module, rounded=name != "float32", clip_norm=float("inf"))
        with pytest.MonkeyPatch.context() as patch:
            if name == "nearest":
                patch.setattr(
                    rounded_moments, "round_stochastically", lambda values, _: values.copy_(values.bfloat16())
                )
            for step in range(500):
                generator = torch.Generator().manual_seed(step)
                scale = 1.0 if step < 50 else 0.1
                module.weight.grad = scale * torch.randn(32, 32, generator=generator)
                optimizer.step(step)
        found[name] = {key: optimizer.state()[f"{key}.weight"].float() for key in ("exp_avg", "exp_avg_sq")}
    second = {name: moments["exp_avg_sq"].mean().item() for name, moments in found.items()}
    assert second["rounded"] == pytest.approx(second["float32"], rel=0.01)
    assert second["nearest"] > 1.3 * second["float32"]
    for key in ("exp_avg", "exp_avg_sq"):
        expected = found["float32"][key]
        assert (found["rounded"][key] - expected).norm() < 0.1 * expected.norm(), key


def test_weights_move_as_with_float32_moments():
    models = [Regression(), Regression()]
    start = copy.deepcopy(models[0].state_dict())
    optimizers = [optimizer_of(models[0], rounded=False), optimizer_of(models[1])]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(1))
    # The first update is computed before anything is rounded.
    assert same(models[0].state_dict(), models[1].state_dict())
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(1, 50))
    for name, value in models[0].state_dict().items():
        apart, moved = (value - models[1].state_dict()[name]).norm(), (value - start[name]).norm()
        assert 0 < apart < 0.02 * moved, name


@pytest.mark.parametrize("at_once", [64, 256])
def test_how_many_are_updated_at_once_changes_no_bit(at_once, monkeypatch):
    """In whole vectors of a CPU, whose kernel may compute what is left of them in another order."""
    found = []
    for size in (rounded_moments.AT_ONCE, at_once):
        monkeypatch.setattr(rounded_moments, "AT_ONCE", size)
        model = Regression()
        optimizer = optimizer_of(model)
        train(model, optimizer, range(3))
        found.append(state_of(model, optimizer))
    assert same(*found)


def test_another_seed_rounds_otherwise_and_the_same_one_alike():
    def trained(seed):
        model = Regression()
        optimizer = optimizer_of(model, seed)
        train(model, optimizer, range(3))
        return state_of(model, optimizer)

    assert same(trained(1), trained(1)) and not same(trained(1), trained(2))


def test_a_step_that_is_not_finite_changes_no_bit():
    model = Regression()
    optimizer = optimizer_of(model)
    train(model, optimizer, range(3))
    before = state_of(model, optimizer)
    model(3).backward()
    model.net[0].weight.grad[0, 0] = torch.nan
    _, skipped = optimizer.step(3)
    assert skipped.item() == 1.0 and same(state_of(model, optimizer), before)
    train(model, optimizer, range(4, 5))
    assert optimizer.state()["step.net.0.weight"].item() == 4.0


def test_an_update_reads_nothing_from_the_device(monkeypatch):
    model = Regression()
    optimizer = optimizer_of(model)
    model(0).backward()

    def refuse(*_, **__):
        raise AssertionError("a value was read from the device inside an update")

    for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    optimizer.step(0)


def test_what_gets_no_gradient_stays_as_adam_without_decay_has_it():
    """Adam's own decay, too: groups are updated by the kernel of their kind."""
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        models = [Regression(), Regression()]
        own = kind(models[0].parameters(), lr=3e-3, weight_decay=0.1, fused=True)
        taken = optimizer_of(models[1])
        rounded = replace(taken, optimizer=kind(models[1].parameters(), lr=3e-3, weight_decay=0.1, fused=True))
        rounded = replace(rounded, clip_norm=float("inf"))
        for model in models:
            model(0).backward()
            model.net[2].bias.grad = None
        own.step()
        rounded.step(0)
        assert same(models[0].state_dict(), models[1].state_dict())


# ---- processes, and a resume ----------------------------------------------------------------------------------------

STEPS, SAVED_AFTER = 6, 3


def layers():
    torch.manual_seed(0)
    # A row less than there are shards, too: then one is empty. Rows are whole vectors of a CPU.
    return nn.Sequential(*(nn.Linear(64, rows, bias=False) for rows in (8, 5, 1)))


def give_gradients(module, step):
    generator = torch.Generator().manual_seed(step)
    for param in module.parameters():
        gradient = torch.randn(param.shape, generator=generator)
        if hasattr(param, "device_mesh"):
            gradient = distribute_tensor(gradient, param.device_mesh, param.placements)
        param.grad = gradient


def steps_of(module, optimizer, steps):
    for step in steps:
        give_gradients(module, step)
        optimizer.step(step)


def write(optimizer, folder, number=0, of=1):
    kinds = {TRAINABLE: optimizer.named(), OPTIMIZER: optimizer.state()}
    taken = {
        kind: {name: Piece(*shard_of(tensor)) for name, tensor in tensors.items() if number == 0 or tensor.ndim}
        for kind, tensors in kinds.items()
    }
    return write_pieces(folder, taken, number, of)


def two(rank, world, folder):
    meet(rank, world, folder)
    replica, shards = layers(), layers()
    mesh = DeviceMesh("cpu", list(range(world)))
    fully_shard(shards, mesh=mesh)
    found = {}
    for name, module in (("ddp", replica), ("fsdp2", shards)):
        optimizer = optimizer_of(module, seed=4, clip_norm=float("inf"))
        steps_of(module, optimizer, range(SAVED_AFTER))
        whole = {name: full_tensor(tensor) for name, tensor in {**optimizer.named(), **optimizer.state()}.items()}
        found[name] = {name: tensor.double().flatten().tolist() for name, tensor in whole.items()}
    everyones = [None] * world
    dist.all_gather_object(everyones, write(optimizer, folder / "step_00000003", rank, world))
    if rank == 0:
        progress = Progress(SAVED_AFTER, 0, {}, {}, "full", 1)
        commit(folder / "step_00000003", progress, {name: file for files in everyones for name, file in files.items()})
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def test_shards_and_replicas_are_one_process_to_the_bit_and_so_is_a_resume(tmp_path):
    processes(two, tmp_path, world=2)
    alone, resumed = layers(), layers()
    options = {"seed": 4, "clip_norm": float("inf")}
    optimizer, again = optimizer_of(alone, **options), optimizer_of(resumed, **options)
    steps_of(alone, optimizer, range(SAVED_AFTER))
    expected = {
        name: tensor.double().flatten().tolist() for name, tensor in {**optimizer.named(), **optimizer.state()}.items()
    }
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["ddp"] == expected and found["fsdp2"] == expected
    steps_of(alone, optimizer, range(SAVED_AFTER, STEPS))
    # From the shards of two processes.
    load_checkpoint(tmp_path / "step_00000003", again.named(), again.state())
    steps_of(resumed, again, range(SAVED_AFTER, STEPS))
    assert same(state_of(alone, optimizer), state_of(resumed, again))
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in again.state().items() if name.startswith("exp_avg"))


def test_a_run_goes_on_with_other_moments(tmp_path):
    """From float32 to the nearest, and from bfloat16 exactly."""
    modules = [layers(), layers(), layers()]
    optimizers = [optimizer_of(module, rounded=number == 1) for number, module in enumerate(modules)]
    steps_of(modules[0], optimizers[0], range(2))
    for number in (1, 2):
        folder = tmp_path / f"step_{number:08d}"
        commit(folder, Progress(2, 0, {}, {}, "full", 1), write(optimizers[number - 1], folder))
        load_checkpoint(folder, optimizers[number].named(), optimizers[number].state())
    states = [optimizer.state() for optimizer in optimizers]
    for name, value in states[0].items():
        assert torch.equal(states[1][name], value.to(states[1][name].dtype))
        assert torch.equal(states[2][name], states[1][name].float())


# ---- the program ----------------------------------------------------------------------------------------------------


def test_a_run_has_the_moments_that_are_asked_for(tmp_path):
    setting = in_process.make_setting(tmp_path)
    runs = [in_process.resolved(setting, **{"train.moments": moments}) for moments in ("fp32", "bf16")]
    optimizers = [in_process.train(run) for run in runs]
    assert [optimizer.moments for optimizer in optimizers] == [torch.float32, torch.bfloat16]
    # What a checkpoint takes on the disk is planned as it is.
    for run, optimizer in zip(runs, optimizers, strict=True):
        tensors = {**optimizer.named(), **optimizer.state()}.items()
        assert run.policy.checkpoint_bytes == sum(value.nbytes for name, value in tensors if value.ndim)
    weights = [optimizer.named() for optimizer in optimizers]
    assert not same(*weights)
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=0, atol=3e-5)  # three steps at a rate of 2.5e-5


def test_the_plan_has_half_of_the_moments(monkeypatch):
    monkeypatch.setattr(rounded_moments, "AT_ONCE", 1024)  # as little beside a policy's as 2**24 are of a real one's

    def planned(moments, **options):
        return step_memory(
            make_config(2),
            "full",
            cameras=2,
            batch_size=2,
            grad_accum=1,
            draws=1,
            bf16=True,
            attention="sdpa",
            checkpointing=False,
            moments=moments,
            **options,
        )

    for options in ({}, {"strategy": "fsdp2", "workers": 2}):
        plain, rounded = planned("fp32", **options), planned("bf16", **options)
        steps = plain.optimizer - 2 * plain.gradients  # a number for each parameter
        assert 0 < steps < plain.gradients / 100 and rounded.optimizer == plain.gradients + steps
        assert plain.peak - rounded.peak == plain.gradients


@pytest.mark.parametrize("flags", [["--train.mode=heads"], ["--peft.r=4"]])
def test_where_they_would_save_nothing_they_are_refused(flags):
    with pytest.raises(ValueError, match="--train.moments=bf16 with --.*so little trains"):
        parse_args(["--policy.path=p", "--dataset.root=d", "--output_dir=o", "--train.moments=bf16", *flags])
