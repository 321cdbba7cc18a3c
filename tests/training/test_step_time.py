"""What a step is predicted to take: its operations, and the arithmetic of a card, by hand."""

from dataclasses import replace

import pytest
import torch

from tests.tiny import make_config
from vla_finetuning.cards import PLANNED, Card
from vla_finetuning.policies.counting import flops_per_sample
from vla_finetuning.training import step_time
from vla_finetuning.training.memory import step_memory
from vla_finetuning.training.step_time import Operation, Operations, assumptions, describe, predict

# A TFLOP/s, a GB/s, a GB/s.
CARD = Card("TEST", 1e12, bandwidth=1e9, link=1e9, multiprocessors=1)
MB = 1_000_000


@pytest.fixture(autouse=True)
def _all_of_it(monkeypatch):
    """Cards that reach their peaks, and kernels that take no time to start."""
    for share in ("PRODUCTS", "ATTENTION", "MEMORY", "LINK"):
        monkeypatch.setattr(step_time, share, 1.0)
    for least in ("KERNEL_S", "COLLECTIVE_S"):
        monkeypatch.setattr(step_time, least, 0.0)


def noted(function, phase="forward"):
    operations = Operations()
    operations.mark(phase)
    with operations:
        function()
    return operations.found


def test_operations_are_kernels_with_the_bytes_that_they_move():
    a, b, out = torch.ones(4, 8), torch.ones(8, 2), torch.empty(4, 8)

    def computed():
        torch.mm(a, b).t().view(2, 4)
        a.add_(1)
        out.copy_(a)
        a + torch.ones(8).expand(4, 8)

    product, added, copied, _, summed = noted(computed)
    assert (product.name, product.kind, product.flops, product.shape) == ("mm", "products", 2 * 4 * 8 * 2, (4, 2))
    assert product.bytes == 4 * (32 + 16 + 8)
    assert (added.kind, added.bytes, copied.bytes) == ("memory", 4 * 64, 4 * 64)
    assert summed.bytes == 4 * (32 + 8 + 32)  # the expanded row once


def test_what_no_phase_has_begun_is_not_noted():
    assert noted(lambda: torch.ones(3) + 1, "other") == []
    assert [operation.kind for operation in noted(lambda: torch.ones(3).neg(), "optimizer")] == ["optimizer"] * 2


def test_a_compiled_stretch_reads_what_was_there_and_writes_what_is_used_later():
    a = torch.ones(MB // 4)

    def computed():
        kept = (a * 2).neg().exp()
        kept.view(250, 1000) @ torch.empty(1000, 1)

    found = noted(computed)
    eager, compiled = (predict(found, CARD, compiled=way, rows=1, flops=0) for way in (False, True))
    assert eager.memory == pytest.approx(6.0)
    assert compiled.memory == pytest.approx(2.0)
    assert (eager.operations, compiled.operations) == (4, 2)


def operation(kind, seconds, phase, name=""):
    """One that takes so long on CARD."""
    size = {0: round(1e9 * seconds)} if kind in ("memory", "collective", "optimizer") else {}
    flops = 0 if size else round(1e12 * seconds)
    return Operation(name, kind, phase, flops, (128, 256), 1, size, {})


def test_products_in_float8_take_half_the_time():
    plain = Operation("mm", "products", "forward", 2 * 10**9, (128, 256), 1, {0: 8}, {})
    found = [
        predict([product], CARD, compiled=False, rows=1, flops=0) for product in (plain, replace(plain, float8=True))
    ]
    assert [time.products for time in found] == pytest.approx([2.0, 1.0])


def exposed(operations, workers=1_000_000, **options):
    return predict(operations, CARD, compiled=False, rows=1, flops=1e9, workers=workers, **options).exposed / 1e3


def test_products_fill_multiprocessors_in_waves():
    one = Operation("mm", "products", "forward", 10**12, (128, 256), 1, {}, {})
    assert predict([one], CARD, compiled=False, rows=1, flops=0).products == pytest.approx(1e3)
    # A tile on 132 multiprocessors, the smaller ones more of them at half the rate.
    alone = predict([one], PLANNED["H100"], compiled=False, rows=1, flops=0).products
    assert alone == pytest.approx(1e3 * 1e12 / 989.5e12 * 132 / (8 * 0.5))


def test_parameters_are_gathered_while_the_layer_before_computes():
    gather, layer = operation("collective", 2, "forward", "_allgather_base_"), operation("products", 3, "forward")
    assert exposed([gather, layer] * 3) == pytest.approx(2, rel=1e-4)
    assert exposed([gather, layer] * 3, workers=1) == 0
    long = operation("collective", 5, "forward", "_allgather_base_")
    assert exposed([long, layer] * 3) == pytest.approx(5 + 2 * (5 - 3), rel=1e-4)


def test_gradients_travel_while_backward_goes_on():
    layer, reduce = (
        operation("products", 3, "backward"),
        operation("collective", 2, "backward", "_reduce_scatter_base_"),
    )
    assert exposed([layer, reduce] * 3) == pytest.approx(2, rel=1e-4)
    # DDP: the last of 26 MiB, and each way.
    size = 52 * 2**20
    assert exposed([layer], exchanged_bytes=size) == pytest.approx(2 * size / 2 / 1e9, rel=1e-2)


def test_a_step_is_its_parts_and_rows_per_second_and_mfu_follow():
    parts = [
        operation("products", 1, "forward"),
        operation("memory", 1, "backward"),
        operation("optimizer", 2, "optimizer"),
    ]
    time = predict(parts, CARD, compiled=False, rows=2, flops=1e11, grad_accum=3)
    assert time.step == pytest.approx(1e3 * (3 * (1 + 1) + 2))
    assert time.rows_per_s == pytest.approx(6 / 8)
    assert time.mfu == pytest.approx(6 / 8 * 0.1)
    text = describe([time])
    assert "MFU" in text and "7.5%" in text and "not measured" in assumptions()


@pytest.mark.parametrize("mode", ["heads", "expert", "full"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_step_multiplies_what_its_flops_say(mode, workers):
    config, operations = make_config(2), Operations()
    strategy = "ddp" if workers == 1 else "fsdp2"
    needed = step_memory(
        config,
        mode,
        cameras=2,
        batch_size=3,
        grad_accum=1,
        draws=1,
        bf16=True,
        attention="eager",
        checkpointing=False,
        strategy=strategy,
        workers=workers,
        operations=operations,
    )
    found = operations.found
    # The vision tower's fused attention multiplies queries and keys once more in backward: no work of the model.
    assert sum(each.flops for each in found) == pytest.approx(3 * flops_per_sample(config, 2, mode), rel=1e-3)
    assert any(each.kind == "collective" for each in found) == (workers == 2)
    adam = [each for each in found if each.name == "_fused_adamw_"]
    # Moments are read and written, and parameters of half their size; gradients are read.
    assert sum(each.bytes for each in adam) == pytest.approx(3.5 * needed.optimizer, rel=0.2)
