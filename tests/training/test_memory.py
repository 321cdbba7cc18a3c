"""The estimate of a step's memory against tensors and torch's profile of a real tiny policy."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.tiny import make_batch, make_config, make_policy
from util import take_optimizer, train_step
from vla_finetuning.options.programs import Config
from vla_finetuning.options.scaling import ScalingOptions
from vla_finetuning.options.train import TrainOptions
from vla_finetuning.policies import recompute
from vla_finetuning.policies.families.pi05 import PI05Loss
from vla_finetuning.policies.optim import make_recipe
from vla_finetuning.policies.trainable import cast_frozen, choose_trainable, remove_unused
from vla_finetuning.training import memory
from vla_finetuning.training.memory import step_memory

CPU = torch.device("cpu")
ROWS = 16


def build(options):
    policy = make_policy(2)
    train = options.train
    choose_trainable(policy, train.mode)
    remove_unused(policy)
    if train.precision == "bf16":
        cast_frozen(policy, torch.bfloat16)
    loss = PI05Loss(policy, attention=train.attention, checkpointing=train.activation_checkpointing)
    built = make_recipe(options, policy.config).build(policy)
    return loss, take_optimizer(policy, built, schedule=lambda step: 1e-3, clip_norm=1.0)


def options_of(mode, bf16, optimizer=(), **train):
    return Config(
        optimizer_options=list(optimizer),
        scaling=ScalingOptions(num_workers=1),
        train=TrainOptions(mode=mode, precision="bf16" if bf16 else "fp32", **train),
    )


def storages(tensors):
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


@pytest.mark.parametrize(
    "mode, attention, checkpointing, bf16, accum, optimizer",
    [
        ("expert", "eager", False, True, 2, []),
        ("full", "sdpa", False, False, 2, ["--type=muon"]),
        ("full", "eager", True, False, 1, ["--type=sgd", "--momentum=0.9"]),
        ("full", "eager", True, False, 1, ["--type=sgd", "--momentum=0"]),
    ],
)
def test_estimate_equals_tensors_and_profile_of_a_real_step(
    mode, attention, checkpointing, bf16, accum, optimizer, monkeypatch
):
    options = options_of(mode, bf16, optimizer, attention=attention, activation_checkpointing=checkpointing)
    loss, optimizer = build(options)
    planned = step_memory(make_config(2), replace(options, batch_size=ROWS, grad_accum=accum), cameras=2)
    batch, noise, time = make_batch(loss.policy, ROWS)
    module_tensors = [*loss.parameters(), *loss.buffers()]
    assert planned.weights == sum(tensor.nbytes for tensor in module_tensors)

    saved = {}

    def record(tensor):
        saved.update(storages([tensor]))
        return tensor

    def hooks_within(pack, unpack):
        """Record also what the inner hooks of a perceptron keep, as torch calls only the innermost."""

        def both(tensor):
            packed = pack(tensor)
            return record(packed) if isinstance(packed, torch.Tensor) else packed

        return torch.autograd.graph.saved_tensors_hooks(both, unpack)

    with monkeypatch.context() as patch:
        patch.setattr(recompute, "saved_tensors_hooks", hooks_within)
        with torch.autograd.graph.saved_tensors_hooks(record, lambda t: t), torch.autocast("cpu", enabled=bf16):
            result = loss(batch, noise, time)
    for known in storages([*module_tensors, *batch.values(), noise, time]):
        saved.pop(known, None)
    assert planned.saved == pytest.approx(sum(saved.values()), rel=0.01)

    result.backward()
    assert planned.gradients == sum(p.grad.nbytes for p in loss.parameters() if p.grad is not None)
    optimizer.step(0)
    assert planned.optimizer == sum(tensor.nbytes for tensor in optimizer.state().values())
    saved.clear()
    del result

    step = partial(train_step, loss, optimizer, grad_accum=accum, mean_over=accum, device=CPU)
    step = partial(step, draws=lambda micro: (noise, time), autocast=torch.bfloat16 if bf16 else None)
    step(iter([batch] * accum), step=1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step(iter([batch] * accum), step=2)
    at_start = planned.weights + planned.optimizer + sum(tensor.nbytes for tensor in (*batch.values(), noise, time))
    assert planned.peak - at_start == pytest.approx(peak_of(profiler), rel=0.05)


def test_later_micro_batches_need_no_more_than_the_planned_one(monkeypatch):
    """With one row, weights and gradients in bf16 need more than activations."""
    options, steps = replace(options_of("full", True), batch_size=1, grad_accum=3), []
    planned = step_memory(make_config(2), options, cameras=2)
    monkeypatch.setattr(memory, "hold_gradients", lambda loss: steps.append(loss))
    monkeypatch.setattr(
        memory, "train_step", lambda *args, **options: train_step(*args, **{**options, "grad_accum": 3})
    )
    assert step_memory(make_config(2), options, cameras=2).peak == planned.peak and steps


def peak_of(profiler):
    """Return the peak bytes of a profile beyond those at its start."""
    events = sorted(
        (event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"),
        key=lambda event: event.start_ns(),
    )
    now = peak = 0
    for event in events:
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def test_elastic_run_is_planned_with_micro_batches_of_fewest_workers():
    def planned(accum, *workers):
        scaling = ScalingOptions(strategy="fsdp2", min_workers=workers[0], num_workers=workers[-1])
        options = replace(options_of("full", False), scaling=scaling, batch_size=ROWS, grad_accum=accum)
        return step_memory(make_config(2), options, cameras=2)

    assert planned(1, 2, 4) == planned(2, 2)
