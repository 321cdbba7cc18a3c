"""Compiled layers against the same step uncompiled."""

import copy

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.parallel import DistributedDataParallel

from tests.tiny import make_batch, make_policy
from util import make_trainable_optimizer, train_step
from vla_finetuning.policies import compiling
from vla_finetuning.policies.compiling import MAX_SHAPES, Compiler, why_not
from vla_finetuning.policies.families.pi05 import PI05Loss
from vla_finetuning.policies.prompts import MAX_LENGTHS
from vla_finetuning.policies.trainable import choose_trainable

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh():
    torch.set_num_threads(1)
    torch._dynamo.reset()
    config = torch._dynamo.config
    with config.patch(recompile_limit=config.recompile_limit, optimize_ddp=config.optimize_ddp):
        yield
    torch._dynamo.reset()


class Counting:
    """Run the graphs that Dynamo captures unchanged, and count them."""

    graphs = 0

    def __call__(self, graph, examples):
        self.graphs += 1
        return graph


def train(policy, module, steps, accum=1, autocast=None, first=0):
    optimizer = make_trainable_optimizer(
        policy, schedule=lambda step: 1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01, clip_norm=1.0
    )
    losses = []
    for step in range(first, first + steps):
        inputs = [make_batch(policy, seed=step * accum + micro) for micro in range(accum)]
        result = train_step(
            module,
            optimizer,
            iter([batch for batch, _, _ in inputs]),
            step=step,
            grad_accum=accum,
            mean_over=accum,
            draws=lambda micro, inputs=inputs: inputs[micro][1:],
            autocast=autocast,
            device=CPU,
        )
        losses.append(result.loss.item())
    return losses


def test_layers_compile_once_with_losses_of_eager():
    """Run the graphs of AOTAutograd by PyTorch: all of compiling but the code generator."""
    policy = make_policy(2)
    choose_trainable(policy, "full")
    plain = copy.deepcopy(policy)
    options = {"attention": "sdpa", "checkpointing": True}
    module, reference = PI05Loss(policy, **options, compile=Compiler("aot_eager")), PI05Loss(plain, **options)
    actual = train(policy, module, 1)
    # Other noise and weights must not recompile.
    with torch.compiler.set_stance("fail_on_recompile"):
        actual += train(policy, module, 1, first=1)
    expected = train(plain, reference, 1) + train(plain, reference, 1, first=1)
    assert actual == pytest.approx(expected, rel=1e-5)


def test_layers_of_same_kind_share_one_graph():
    policy = make_policy(2)
    choose_trainable(policy, "full")
    backend = Counting()
    module = PI05Loss(policy, compile=Compiler(backend))
    train(policy, module, 1, accum=2)
    assert backend.graphs == 4  # vision, language and action layers (2, 2 and 3 of them); the last keys and values
    frames = torch._dynamo.utils.counters["frames"]["total"]
    train(policy, module, 1, accum=2, first=1)
    assert list(module.state_dict()) == list(PI05Loss(policy).state_dict())  # checkpoint names are unchanged
    assert backend.graphs == 4 and torch._dynamo.utils.counters["frames"]["total"] == frames


def test_compiled_layers_under_autocast_and_ddp_equal_eager(process_group):
    policy = make_policy(2)
    choose_trainable(policy, "expert")
    plain = copy.deepcopy(policy)
    backend = Counting()
    # Buckets as small as a layer, at whose ends Dynamo would break the graph.
    module = DistributedDataParallel(PI05Loss(policy, attention="sdpa", compile=Compiler(backend)), bucket_cap_mb=0.02)
    reference = DistributedDataParallel(PI05Loss(plain, attention="sdpa"))
    actual = train(policy, module, 2, accum=2, autocast=torch.bfloat16)
    assert actual == pytest.approx(train(plain, reference, 2, accum=2, autocast=torch.bfloat16), rel=1e-4)
    assert backend.graphs == 4


def test_compiler_refuses_more_shapes_than_limit(monkeypatch):
    # Each length of prompts, with and without gradients, for action tokens and text, with all cameras and with fewer.
    assert 8 * MAX_LENGTHS < MAX_SHAPES
    monkeypatch.setattr(compiling, "MAX_SHAPES", 2)
    compiler = Compiler("eager")
    layer = compiler(_double)
    for length in (3, 3, 4, 4):
        assert layer(torch.nn.Linear(1, 1), torch.ones(1, length)).tolist() == [[2.0] * length]
        assert compiler.compilations == length - 2
    with pytest.raises(FailOnRecompileLimitHit):
        layer(torch.nn.Linear(1, 1), torch.ones(1, 5))


def _double(layer, values):
    return 2 * values


def test_compiling_requires_gpu_and_triton(monkeypatch):
    assert why_not(CPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla P100")
    for has_triton in (False, True):
        monkeypatch.setattr(compiling, "has_triton", lambda has_triton=has_triton: has_triton)
        assert (why_not(torch.device("cuda", 0)) is None) == has_triton


@pytest.mark.slow
def test_inductor_losses_equal_eager():
    """Compile with Inductor's C++ compiler: a minute or two."""
    policy = make_policy(2)
    choose_trainable(policy, "full")
    plain = copy.deepcopy(policy)
    actual = train(policy, PI05Loss(policy, attention="sdpa", compile=Compiler()), 3)
    assert actual == pytest.approx(train(plain, PI05Loss(plain, attention="sdpa"), 3), rel=1e-4)
