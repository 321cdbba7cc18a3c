"""The step against plain PyTorch."""

import copy
import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lerobot.optim.schedulers import CosineDecayWithWarmupSchedulerConfig
from torch import nn

from util import (
    NumpyToTorchCollate,
    StepResult,
    TimedIterator,
    Window,
    card_of_device,
    cuda_prefetcher,
    make_trainable_optimizer,
    peak_flops,
    train_step,
    warmup_cosine,
)

CPU = torch.device("cpu")
ADAM = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}


class Regression(nn.Module):
    """A loss module with the signature of PolicyLoss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, batch, noise, time):
        return ((self.net(batch["x"]) + noise * time[:, None] - batch["y"]) ** 2).mean()


def batches(n, size, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        {"x": torch.randn(size, 5, generator=generator), "y": torch.randn(size, 1, generator=generator)}
        for _ in range(n)
    ]


def draws_for(step, size):
    generator = torch.Generator().manual_seed(step)
    noise, time = torch.randn(size, 1, generator=generator), torch.rand(size, generator=generator)
    return noise, time


def run(model, data, steps, accum, size, schedule=lambda s: 1e-2, clip=1.0):
    optimizer = make_trainable_optimizer(model, schedule=schedule, clip_norm=clip, **ADAM)
    feed, results = iter(data), []
    for step in range(steps):
        noise, time = draws_for(step, size * accum)

        def draws(micro, noise=noise, time=time):
            rows = slice(micro * size, (micro + 1) * size)
            return noise[rows], time[rows]

        results.append(
            train_step(
                model,
                optimizer,
                feed,
                step=step,
                grad_accum=accum,
                mean_over=accum,
                draws=draws,
                autocast=None,
                device=CPU,
            )
        )
    return results, optimizer


def test_the_step_is_plain_adamw_with_clipping_and_schedule():
    ours, plain = Regression(), Regression()
    data = batches(20, 8)
    schedule = warmup_cosine(1e-2, 1e-3, 3, 10)
    results, _ = run(ours, data, steps=10, accum=2, size=8, schedule=schedule, clip=0.05)

    reference = torch.optim.AdamW(plain.parameters(), lr=1.0, foreach=False, fused=False, **ADAM)
    for step in range(10):
        noise, time = draws_for(step, 16)
        losses = []
        for micro in range(2):
            rows = slice(micro * 8, micro * 8 + 8)
            loss = plain(data[2 * step + micro], noise[rows], time[rows])
            (loss / 2).backward()
            losses.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        reference.param_groups[0]["lr"] = schedule(step)
        reference.step()
        reference.zero_grad()
        assert results[step].loss.item() == pytest.approx(np.mean(losses), rel=1e-6)
        assert results[step].grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_accumulating_n_times_one_equals_one_times_n():
    small = batches(24, 2)
    large = [{k: torch.cat([b[k] for b in small[i : i + 4]]) for k in ("x", "y")} for i in range(0, 24, 4)]
    a, b = Regression(), Regression()
    run(a, small, steps=6, accum=4, size=2)
    run(b, large, steps=6, accum=1, size=8)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(bad):
    model = Regression()
    data = batches(3, 8)
    data[1]["y"][3] = bad
    optimizer = make_trainable_optimizer(model, schedule=lambda s: 1e-2, clip_norm=1.0, **ADAM)
    window, feed = Window(CPU), iter(data)
    states = []
    for step in range(3):
        noise, time = draws_for(step, 8)
        result = train_step(
            model,
            optimizer,
            feed,
            step=step,
            grad_accum=1,
            mean_over=1,
            draws=lambda m, d=(noise, time): d,
            autocast=None,
            device=CPU,
        )
        window.add(result, samples=8)
        states.append({**copy.deepcopy(model.state_dict()), **copy.deepcopy(optimizer.state())})
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key
    assert any(not torch.equal(value, states[2][key]) for key, value in states[1].items())
    metrics, _ = window.gather(0.0)
    assert metrics["nonfinite_steps"] == 1 and metrics["samples"] == 24
    assert np.isfinite(metrics["loss"])


def test_nothing_is_read_from_the_device_between_log_steps(monkeypatch):
    model, data = Regression(), batches(4, 8)
    window = Window(CPU)

    def refuse(*_, **__):
        raise AssertionError("a value was read from the device inside a step")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__"):
            patch.setattr(torch.Tensor, name, refuse)
        results, _ = run(model, data, steps=4, accum=1, size=8)
        for result in results:
            window.add(result, samples=8)
    assert window.gather(0.0)[0]["samples"] == 32


def test_optimizer_state_comes_back_by_name():
    data = batches(8, 4)
    whole, half = Regression(), Regression()
    run(whole, data, steps=8, accum=1, size=4)
    _, optimizer = run(half, data[:4], steps=4, accum=1, size=4)
    saved = {k: v.clone() for k, v in optimizer.state().items()}

    fresh = Regression()
    fresh.load_state_dict(half.state_dict())
    resumed = make_trainable_optimizer(fresh, schedule=lambda s: 1e-2, clip_norm=1.0, **ADAM)
    for name, value in resumed.state().items():
        value.copy_(saved.pop(name))
    assert not saved
    feed = iter(data[4:])
    for step in range(4, 8):
        train_step(
            fresh,
            resumed,
            feed,
            step=step,
            grad_accum=1,
            mean_over=1,
            draws=lambda micro, step=step: draws_for(step, 4),
            autocast=None,
            device=CPU,
        )
    for a, b in zip(whole.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(a, b)


def test_only_what_trains_is_optimised_and_it_must_be_float32():
    model = Regression()
    model.net[0].requires_grad_(False)
    options = {"schedule": lambda s: 1e-2, "clip_norm": 1.0, **ADAM}
    assert make_trainable_optimizer(model, **options).names == ["net.2.weight", "net.2.bias"]
    model.net[2].to(torch.bfloat16)
    with pytest.raises(ValueError, match="not float32, e.g. net.2.weight"):
        make_trainable_optimizer(model, **options)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing would be trained"):
        make_trainable_optimizer(model, **options)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 10), (3, 10), (100, 1000)])
def test_the_schedule_is_lerobots(warmup, steps):
    ours = warmup_cosine(1e-3, 1e-4, warmup, steps)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-3)
    theirs = CosineDecayWithWarmupSchedulerConfig(
        num_warmup_steps=warmup, num_decay_steps=steps, peak_lr=1e-3, decay_lr=1e-4
    ).build(optimizer, steps)
    for step in range(steps + 2):
        assert ours(step) == pytest.approx(theirs.lr_lambdas[0](step) * 1e-3, rel=1e-9), step


def test_collate_copies_numbers_and_refuses_objects():
    source = {"image": np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3), "pad": np.array([[True], [False]])}
    source["image"].setflags(write=False)
    out = NumpyToTorchCollate(pin_memory=False)(source)
    assert out["image"].dtype == torch.uint8 and out["pad"].dtype == torch.bool
    np.testing.assert_array_equal(out["image"].numpy(), source["image"])
    out["image"].zero_()  # ours to write; the object store's block is untouched
    assert source["image"].any()
    with pytest.raises(ValueError, match="'task' holds Python objects"):
        NumpyToTorchCollate(pin_memory=False)({"task": np.array(["a"], object)})


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned here")
def test_memory_that_cannot_be_pinned_is_said_once(caplog):
    collate = NumpyToTorchCollate(pin_memory=True)
    for _ in range(2):
        assert collate({"a": np.ones(3, np.float32)})["a"].tolist() == [1, 1, 1]
    assert len([r for r in caplog.records if "cannot be pinned" in r.message]) == 1


def test_without_a_gpu_batches_pass_through_and_waiting_is_counted():
    data = batches(3, 2)
    timed = TimedIterator(cuda_prefetcher(data, CPU))
    assert [b is d for b, d in zip(timed, data, strict=True)] == [True] * 3
    assert timed.waited_s > 0
    with pytest.raises(StopIteration):
        next(timed)


def test_what_is_made_of_batches_is_no_waiting():
    def slower(batches):
        for batch in batches:
            time.sleep(0.2)
            yield {**batch, "made": True}

    timed = TimedIterator(cuda_prefetcher(batches(3, 2), CPU), then=slower)
    assert [batch["made"] for batch in timed] == [True] * 3
    assert 0 < timed.waited_s < 0.2


@pytest.mark.gpu
def test_prefetched_batches_arrive_whole_on_the_gpu():
    device = torch.device("cuda")
    collate = NumpyToTorchCollate(pin_memory=True)
    source = (collate({"a": np.full((512, 1024), i, np.float32), "index": np.array([i])}) for i in range(50))
    for i, batch in enumerate(cuda_prefetcher(source, device)):
        assert batch["a"].is_cuda and not batch["index"].is_cuda
        product = batch["a"] @ torch.ones(1024, 64, device=device)  # keeps the stream busy while the next is copied
        assert (product == i * 1024).all().item()


@pytest.mark.parametrize(
    "name, tera",
    [
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA A10G", 70),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_peak_rates_go_by_the_whole_name(name, tera, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 2**30))
    found = peak_flops(torch.device("cuda", 0))
    assert found is None if tera is None else found == pytest.approx(tera * 1e12)
    assert peak_flops(CPU) is None


@pytest.mark.parametrize("gib, card", [(39.4, "A100-40G"), (39.6, "A100-40G"), (79.2, "A100-80G"), (79.3, "A100-80G")])
def test_a_card_that_is_sold_in_two_sizes_goes_by_its_memory(gib, card, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=gib * 2**30))
    assert card_of_device(torch.device("cuda", 0)).name == card


def test_a_window_tells_the_loss_of_each_robot():
    sums = torch.tensor([[7.0, 7.0, 7.0], [1.0, 1.0, 1.0]])
    window = Window(CPU, ("arm", "gantry", "none"), sums)
    sums += torch.tensor([[6.0, 1.0, 0.0], [4.0, 2.0, 0.0]])
    window.add(StepResult(torch.ones(()), torch.ones(()), torch.zeros(())), samples=6)
    assert window.gather(0.0)[0]["loss_by_robot"] == {"arm": 1.5, "gantry": 0.5, "none": None}
    assert "loss_by_robot" not in Window(CPU).gather(0.0)[0]


def test_one_collective_and_one_read_per_log_step(monkeypatch, tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        counts = itertools.count()
        original = dist.all_gather_into_tensor

        def counted(*args, **options):
            next(counts)
            return original(*args, **options)

        for name in ("all_reduce", "broadcast", "all_gather", "barrier"):
            monkeypatch.setattr(dist, name, lambda *a, **k: pytest.fail("another collective"))
        monkeypatch.setattr(dist, "all_gather_into_tensor", counted)
        window = Window(CPU)
        results, _ = run(Regression(), batches(3, 8), steps=3, accum=1, size=8)
        for result in results:
            window.add(result, samples=8)
        metrics, asked = window.gather(1.5, True, False)
        assert next(counts) == 1
        assert metrics["loss"] == pytest.approx(np.mean([r.loss.item() for r in results]), rel=1e-6)
        assert metrics["data_wait_s"] == pytest.approx(0.5)
        assert asked == [True, False]
        assert metrics["grad_norm"] == pytest.approx(results[-1].grad_norm.item(), rel=1e-6)
    finally:
        dist.destroy_process_group()
