"""The estimate of a step's memory against what a real tiny policy takes."""

import functools
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.tiny import make_batch, make_config, make_policy
from util import make_trainable_optimizer, train_step
from vla_finetuning.options.programs import Config
from vla_finetuning.options.scaling import ScalingOptions
from vla_finetuning.options.train import TrainOptions
from vla_finetuning.policies import recompute
from vla_finetuning.policies.families.pi05 import PI05Loss
from vla_finetuning.policies.trainable import cast_frozen, choose_trainable, remove_unused
from vla_finetuning.training import memory
from vla_finetuning.training.memory import step_memory

CPU = torch.device("cpu")
ROWS = 16
CASES = pytest.mark.parametrize(
    "mode, attention, checkpointing, bf16, accum",
    [
        ("expert", "eager", False, True, 2),
        ("full", "sdpa", False, False, 2),
        ("full", "eager", True, False, 1),
    ],
)


def build(mode, attention, checkpointing, bf16):
    policy = make_policy(2)
    choose_trainable(policy, mode)
    remove_unused(policy)
    if bf16:
        cast_frozen(policy, torch.bfloat16)
    loss = PI05Loss(policy, attention=attention, checkpointing=checkpointing)
    optimizer = make_trainable_optimizer(
        policy, schedule=lambda step: 1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01, clip_norm=1.0
    )
    return loss, optimizer


@functools.cache
def estimate(mode, attention, checkpointing, bf16, accum):
    options = options_of(mode, bf16, attention=attention, activation_checkpointing=checkpointing)
    return step_memory(make_config(2), replace(options, batch_size=ROWS, grad_accum=accum), cameras=2)


def options_of(mode, bf16, **train):
    """Return the options of one worker."""
    return Config(
        scaling=ScalingOptions(num_workers=1),
        train=TrainOptions(mode=mode, precision="bf16" if bf16 else "fp32", **train),
    )


def storages(tensors):
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


@CASES
def test_every_part_is_what_a_real_step_holds(mode, attention, checkpointing, bf16, accum, monkeypatch):
    loss, optimizer = build(mode, attention, checkpointing, bf16)
    found = estimate(mode, attention, checkpointing, bf16, accum)
    batch, noise, time = make_batch(loss.policy, ROWS)
    own = [*loss.parameters(), *loss.buffers()]
    assert found.weights == sum(tensor.nbytes for tensor in own)

    saved = {}

    def keep(tensor):
        saved.update(storages([tensor]))
        return tensor

    def hooks_within(pack, unpack):
        """Only the innermost hooks are asked: those of a perceptron tell what they keep, too."""

        def both(tensor):
            packed = pack(tensor)
            return keep(packed) if isinstance(packed, torch.Tensor) else packed

        return torch.autograd.graph.saved_tensors_hooks(both, unpack)

    monkeypatch.setattr(recompute, "saved_tensors_hooks", hooks_within)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", enabled=bf16):
        result = loss(batch, noise, time)
    for known in storages([*own, *batch.values(), noise, time]):
        saved.pop(known, None)
    assert found.saved == pytest.approx(sum(saved.values()), rel=0.01)

    result.backward()
    assert found.gradients == sum(p.grad.nbytes for p in loss.parameters() if p.grad is not None)
    optimizer.step(0)
    assert found.optimizer == sum(tensor.nbytes for tensor in optimizer.state().values())


@CASES
def test_the_peak_is_what_pytorchs_profiler_sees(mode, attention, checkpointing, bf16, accum):
    loss, optimizer = build(mode, attention, checkpointing, bf16)
    found = estimate(mode, attention, checkpointing, bf16, accum)
    batch, noise, time = make_batch(loss.policy, ROWS)

    def step(number):
        train_step(
            loss,
            optimizer,
            iter([batch] * accum),
            step=number,
            grad_accum=accum,
            mean_over=accum,
            draws=lambda micro: (noise, time),
            autocast=torch.bfloat16 if bf16 else None,
            device=CPU,
        )

    step(0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step(1)
    peak = peak_of(profiler)
    held = found.weights + found.optimizer + sum(tensor.nbytes for tensor in (*batch.values(), noise, time))
    assert found.peak - held == pytest.approx(peak, rel=0.05)


def test_later_micro_batches_take_no_more_than_the_one_that_is_planned(monkeypatch):
    """With few rows, when weights and gradients in bf16 take more than activations."""
    options, steps = replace(options_of("full", True), batch_size=1, grad_accum=3), []
    planned = step_memory(make_config(2), options, cameras=2)
    monkeypatch.setattr(memory, "hold_gradients", lambda loss: steps.append(loss))
    monkeypatch.setattr(memory, "train_step", lambda *args, **given: train_step(*args, **{**given, "grad_accum": 3}))
    assert step_memory(make_config(2), options, cameras=2).peak == planned.peak and steps


def peak_of(profiler):
    """Bytes beyond those at its start, at the worst moment of what it watched."""
    events = sorted(
        (event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"),
        key=lambda event: event.start_ns(),
    )
    now = peak = 0
    for event in events:
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def test_the_fewest_workers_of_an_elastic_group_have_the_most_micro_batches():
    def planned(accum, *workers):
        scaling = ScalingOptions(strategy="fsdp2", min_workers=workers[0], num_workers=workers[-1])
        options = replace(options_of("full", False), scaling=scaling, batch_size=ROWS, grad_accum=accum)
        return step_memory(make_config(2), options, cameras=2)

    assert planned(1, 2, 4) == planned(2, 2)
