"""Training step, average, schedule and metrics against plain PyTorch and LeRobot."""

import copy
import time
from unittest.mock import MagicMock, Mock, call

import numpy as np
import pytest
import torch
from lerobot.optim.schedulers import CosineDecayWithWarmupSchedulerConfig
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from util import (
    DeviceMetrics,
    NumpyToTorchCollate,
    StepResult,
    TimedIterator,
    cuda_prefetcher,
    enable_expandable_segments,
    full_tensor,
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
    shapes = {"x": (size, 5), "y": (size, 1)}
    return [{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(n)]


def draws_for(step, size):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 1, generator=generator), torch.rand(size, generator=generator)


@pytest.fixture
def group(tmp_path):
    """Start a process group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def take_step(model, optimizer, feed, step, size, accum=1, **options):
    noise, time = draws_for(step, size * accum)

    def draws(micro):
        rows = slice(micro * size, (micro + 1) * size)
        return noise[rows], time[rows]

    options = {"grad_accum": accum, "mean_over": accum, "draws": draws, "autocast": None, "device": CPU, **options}
    return train_step(model, optimizer, feed, step=step, **options)


def make_optimizer(model, schedule=lambda step: 1e-2, clip_norm=1.0, **options):
    return make_trainable_optimizer(model, schedule=schedule, clip_norm=clip_norm, **ADAM, **options)


def run(model, data, steps, accum, size, **options):
    of_optimizer = {name: options.pop(name) for name in ("schedule", "clip_norm", "decay") if name in options}
    optimizer, feed = make_optimizer(model, **of_optimizer), iter(data)
    return [take_step(model, optimizer, feed, step, size, accum, **options) for step in range(steps)], optimizer


@pytest.mark.parametrize("sharded", [False, True])
def test_train_step_equals_plain_adamw_with_clipping_and_schedule(sharded, request):
    ours, plain = Regression(), Regression()
    if sharded:
        request.getfixturevalue("group")
        ours = fully_shard(ours)
        ours.whole_between_micro_batches = True
    data = batches(20, 8)
    schedule = warmup_cosine(1e-2, 1e-3, 3, 10)
    results, optimizer = run(ours, data, steps=10, accum=2, size=8, schedule=schedule, clip_norm=0.05)

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
        torch.testing.assert_close(full_tensor(a.detach()), b.detach(), rtol=1e-5, atol=1e-7)
        assert type(full_tensor(a.detach())) is torch.Tensor
    assert {int(value) for name, value in optimizer.state().items() if name.startswith("step.")} == {10}


@pytest.mark.parametrize("bad", [None, 2])
def test_average_equals_pytorchs_and_averaged_restores_parameters(bad):
    data, model = batches(5, 8), Regression()
    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    reference.update_parameters(model)
    if bad is not None:
        data[bad]["y"][0] = float("nan")
    plain, feed = Regression(), iter(data)
    without_average = make_optimizer(plain)
    for step in range(5):
        take_step(plain, without_average, feed, step, 8)
        if step != bad:
            reference.update_parameters(plain)
    _, optimizer = run(model, data, 5, 1, 8, decay=0.9)
    expected = {f"average.{name}": value for name, value in reference.module.named_parameters()}
    torch.testing.assert_close(optimizer.named_average(), expected, rtol=1e-5, atol=1e-7)
    parameters, average = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.named_average())
    with optimizer.averaged():
        for name, value in model.named_parameters():
            assert torch.equal(value, average[f"average.{name}"])
    torch.testing.assert_close(model.state_dict(), parameters, rtol=0, atol=0)
    torch.testing.assert_close(optimizer.named_average(), average, rtol=0, atol=0)
    assert without_average.named_average() == {} and without_average.decay == 0.0
    with without_average.averaged():
        pass


@pytest.mark.parametrize("preallocated", [False, True])
def test_preallocated_gradients_stay_in_their_memory(preallocated):
    """DDP's buckets need it; other gradients are freed."""
    model = Regression()
    params = list(model.parameters())
    for param in params if preallocated else ():
        param.grad = torch.zeros_like(param)
    addresses = [param.grad.data_ptr() for param in params] if preallocated else []
    run(model, batches(2, 8), 2, 1, 8)
    if preallocated:
        assert [param.grad.data_ptr() for param in params] == addresses
        assert not any(param.grad.any() for param in params)
    else:
        assert [param.grad for param in params] == [None] * len(params)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_step_changes_no_state_and_is_counted(bad):
    model, data = Regression(), batches(3, 8)
    data[1]["y"][3] = bad
    optimizer, window, feed, states = make_optimizer(model), DeviceMetrics(CPU), iter(data), []
    for step in range(3):
        window.add_step(take_step(model, optimizer, feed, step, 8), samples=8)
        states.append({**copy.deepcopy(model.state_dict()), **copy.deepcopy(optimizer.state())})
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key
    assert any(not torch.equal(value, states[2][key]) for key, value in states[1].items())
    metrics, _ = window.gather({"waited_s": 0.0})
    assert metrics["nonfinite_steps"] == 1 and metrics["samples"] == 24 and np.isfinite(metrics["loss"])


def test_optimizer_has_trainable_parameters_only_and_requires_float32():
    model = Regression()
    model.net[0].requires_grad_(False)
    assert make_optimizer(model).names == ["net.2.weight", "net.2.bias"]
    model.net[2].to(torch.bfloat16)
    with pytest.raises(ValueError, match="not float32, e.g. net.2.weight"):
        make_optimizer(model)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing would be trained"):
        make_optimizer(model)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 10), (3, 10), (100, 1000)])
def test_warmup_cosine_equals_lerobots_schedule(warmup, steps):
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
    out["image"].zero_()  # does not write to the object store's block
    assert source["image"].any()
    with pytest.raises(ValueError, match="'task' holds Python objects"):
        NumpyToTorchCollate(pin_memory=False)({"task": np.array(["a"], object)})


def test_collate_pins_only_nonempty_arrays_for_the_gpu(monkeypatch):
    real, pinned = torch.empty, []
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory, **o: pinned.append(pin_memory) or real(*a, **o))
    batch = {"image": np.ones(1, np.uint8), "index": np.ones(1, np.int64), "empty": np.ones((2, 0), np.float32)}
    collate = NumpyToTorchCollate(pin_memory=True)
    for _ in range(2):
        collate(batch)
    assert pinned == [True] + 2 * [True, False, False]  # first a probe
    pinned.clear()
    NumpyToTorchCollate(pin_memory=False)(batch)
    assert pinned == [False] * 3


def test_prefetcher_copies_next_batch_on_a_side_stream(monkeypatch):
    """Order of copies and of waits between streams, recorded by a mock of the driver."""
    gpu, device = MagicMock(), torch.device("cuda")
    gpu.index.is_cuda, gpu.a.to.return_value.is_cuda = False, True
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: gpu.side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: gpu.main)
    monkeypatch.setattr(torch.cuda, "stream", gpu.within)
    for batch in cuda_prefetcher([{"a": gpu.a, "index": gpu.index}] * 2, device, gpu.clock):
        gpu.step(batch["a"] is gpu.a.to.return_value, batch["index"] is gpu.index)
    copied = [call.clock.mark("copy"), call.a.to(device, non_blocking=True), call.clock.mark("copy")]
    copied = [call.within(gpu.side), call.within().__enter__(), *copied, call.within().__exit__(None, None, None)]
    used = [call.main.wait_stream(gpu.side), call.a.to().record_stream(gpu.main), call.step(True, True)]
    assert gpu.mock_calls == 2 * [*copied, *used]


@pytest.mark.parametrize("variable", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "no GPU"])
def test_expandable_segments_are_set_unless_environment_overrides(variable, monkeypatch):
    settings, apply = [], torch._C._accelerator_setAllocatorSettings
    if variable:
        monkeypatch.setenv(variable, "x")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: variable != "no GPU")
    # PyTorch refuses unknown settings.
    monkeypatch.setattr(
        torch._C, "_accelerator_setAllocatorSettings", lambda text: settings.append(text) or apply(text)
    )
    enable_expandable_segments()
    assert settings == ([] if variable else ["expandable_segments:True"])


def test_timed_iterator_on_cpu_passes_batches_through_and_counts_waits():
    data = batches(3, 2)
    timed = TimedIterator(cuda_prefetcher(data, CPU))
    assert timed.waited_s == 0 and timed.peek() is timed.peek() is data[0]
    assert [b is d for b, d in zip(timed, data, strict=True)] == [True] * 3
    assert timed.waited_s > 0
    with pytest.raises(StopIteration):
        next(timed)

    def slow_transform(batches):
        for batch in batches:
            time.sleep(0.05)
            yield {**batch, "transformed": True}

    timed = TimedIterator(cuda_prefetcher(data, CPU), then=slow_transform)
    assert [batch["transformed"] for batch in timed] == [True] * 3
    assert 0 < timed.waited_s < 0.05, "the time of the transform is no wait"


@pytest.mark.gpu
def test_prefetched_batches_are_complete_on_the_gpu():
    device = torch.device("cuda")
    collate = NumpyToTorchCollate(pin_memory=True)
    source = (collate({"a": np.full((512, 1024), i, np.float32), "index": np.array([i])}) for i in range(50))
    for i, batch in enumerate(cuda_prefetcher(source, device)):
        assert batch["a"].is_cuda and not batch["index"].is_cuda
        product = batch["a"] @ torch.ones(1024, 64, device=device)  # keeps the stream busy while the next is copied
        assert (product == i * 1024).all().item()


# In teraFLOP/s; None: unknown.
PEAKS = {
    **{"NVIDIA L4": 121, "L4": 121, "NVIDIA L40S": 362.05, "NVIDIA A10G": 70, "NVIDIA A100-SXM4-80GB": 312},
    **{"NVIDIA H100 80GB HBM3": 989.5, "NVIDIA H100 PCIe": 756.5, "NVIDIA H100 NVL": 835.5},
    **{"NVIDIA H200": 989.5, "NVIDIA H200 NVL": 835.5, "NVIDIA B200": 2250},
    **dict.fromkeys(("NVIDIA L40", "NVIDIA RTX A1000", "Tesla V100-SXM2-16GB")),
}


def test_peak_flops_matches_the_full_device_name(monkeypatch):
    for name, tera in PEAKS.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda", 0)) == (tera and pytest.approx(tera * 1e12)), name
    assert peak_flops(CPU) is None


def gathered(metrics, **host):
    return metrics.gather({"waited_s": 0.0, **host})


def step_result(loss=1.0, grad_norm=1.0, skipped=0.0):
    return StepResult(*map(torch.tensor, (loss, grad_norm, skipped)))


@pytest.fixture
def gather_on_ranks(monkeypatch):
    """Return a function that gathers two ranks' metrics, one after the other, and returns the last rank's result."""

    def gather(*ranks, hosts=({}, {})):
        sent = []

        def all_gather(out, part):
            sent.append(part)
            assert len(part) == len(sent[0]), "ranks send equally many numbers, whatever a policy computes"
            out.copy_(torch.cat([sent[0], part]))

        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(dist, "all_gather_into_tensor", all_gather)
        return [gathered(metrics, **host) for metrics, host in zip(ranks, hosts, strict=True)][-1]

    return gather


def test_metric_means_have_their_labels_and_names():
    metrics = DeviceMetrics(CPU)
    metrics.sums("loss_by_robot", ("arm", "gantry", "none")).fill_(7.0)
    metrics.add("l1_loss", 3.0)
    metrics.restart()
    metrics.sums("loss_by_robot").add_(torch.tensor([[6.0, 1.0, 0.0], [4.0, 2.0, 0.0]]))
    metrics.add_step(step_result(), samples=6)
    line, _ = gathered(metrics)
    assert line["loss_by_robot"] == {"arm": 1.5, "gantry": 0.5, "none": None}
    assert "l1_loss" not in line, "nothing was added since the window began"
    metrics.add("l1_loss", torch.tensor(1.0))
    metrics.add("l1_loss", 2.0)
    metrics.add("kld_loss", 0.25)
    line, _ = gathered(metrics)
    assert (line["l1_loss"], line["kld_loss"]) == (1.5, 0.25)
    assert "loss_by_robot" not in gathered(DeviceMetrics(CPU))[0]


def test_nonfinite_values_and_reserved_names_do_not_change_means():
    metrics = DeviceMetrics(CPU)
    for value in (1.0, float("nan"), torch.tensor(3.0), torch.tensor(float("inf"))):
        metrics.add("l1_loss", value)
    metrics.add("grad_norm", 100.0)
    metrics.add_step(step_result(grad_norm=2.0), samples=1)
    line, _ = gathered(metrics)
    assert line["l1_loss"] == 2.0 and line["grad_norm"] == 2.0


def test_means_of_ranks_are_joined_if_their_names_agree(gather_on_ranks):
    def of_rank(**values):
        metrics = DeviceMetrics(CPU)
        metrics.sums("loss_by_robot", ("arm", "gantry"))[:, 1] = torch.tensor([values.pop("robot"), 2.0])
        for name, value in values.items():
            metrics.add(name, value)
        return metrics

    line, _ = gather_on_ranks(of_rank(robot=2.0, l1_loss=1.0), of_rank(robot=4.0, l1_loss=3.0))
    assert line["l1_loss"] == 2.0 and line["loss_by_robot"] == {"arm": None, "gantry": 1.5}
    line, _ = gather_on_ranks(of_rank(robot=2.0, l1_loss=1.0), of_rank(robot=4.0, a=3.0, b=1.0))
    assert not {"l1_loss", "a", "b"} & line.keys() and line["loss_by_robot"] == {"arm": None, "gantry": 1.5}


def test_metrics_gather_needs_one_collective_per_window(monkeypatch, group):
    all_gather = Mock(side_effect=dist.all_gather_into_tensor)
    for name in ("all_reduce", "broadcast", "all_gather", "barrier"):
        monkeypatch.setattr(dist, name, lambda *a, **k: pytest.fail("another collective"))
    monkeypatch.setattr(dist, "all_gather_into_tensor", all_gather)
    window = DeviceMetrics(CPU)
    results, _ = run(Regression(), batches(3, 8), steps=3, accum=1, size=8)
    for result in results:
        window.add_step(result, samples=8)
    metrics, _ = window.gather({"waited_s": 1.5, "stop": 1.0, "save": 0.0})
    assert all_gather.call_count == 1
    assert metrics["loss"] == pytest.approx(np.mean([r.loss.item() for r in results]), rel=1e-6)


def test_window_metrics_cover_all_ranks(gather_on_ranks, monkeypatch):
    """Two steps each, the second of rank 1 skipped; times are the slower rank's."""
    ranks = []
    for rank, losses in enumerate(([1.0, 3.0], [2.0, float("nan")])):
        monkeypatch.setattr(time, "perf_counter", lambda began=10.0 - 4 * rank: began)
        ranks.append(metrics := DeviceMetrics(CPU))
        metrics.sums("loss_by_robot", ("arm", "gantry")).add_(torch.tensor([[3.0, 0.0], [2.0, rank]]))
        for step, loss in enumerate(losses):
            metrics.add_step(step_result(loss, 5.0 * step + rank, float(np.isnan(loss))), samples=10)
    monkeypatch.setattr(time, "perf_counter", lambda: 14.0)
    hosts = [{"waited_s": 3.0 - rank, "save": rank, "flops": 1000.0 * rank} for rank in range(2)]
    line, by_rank = gather_on_ranks(*ranks, hosts=hosts)
    assert line == {
        "loss": (1 + 3 + 2) / 3,
        "grad_norm": (5 + 6) / 2,
        "nonfinite_steps": 1,
        "samples": 40,
        "samples_per_s": 40 / 8,
        "step_s": 8 / 2,
        "data_wait_s": 3 / 2,
        "peak_memory_bytes": None,
        "loss_by_robot": {"arm": 6 / 4, "gantry": 0.0},
    }
    assert by_rank["save"] == [0, 1] and by_rank["flops"] == [0, 1000] and by_rank["elapsed_s"] == [4, 8]


def test_window_metrics_without_a_step(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 10.0)
    metrics = DeviceMetrics(CPU)
    monkeypatch.setattr(time, "perf_counter", lambda: 14.0)
    line, _ = metrics.gather({"waited_s": 3.0})
    assert np.isnan(line.pop("loss"))
    numbers = {"grad_norm": 0, "nonfinite_steps": 0, "samples": 0, "samples_per_s": 0, "step_s": 4, "data_wait_s": 3}
    assert line == {**numbers, "peak_memory_bytes": None}
