"""The optimizer's step on shards against PyTorch's clipping and AdamW of DTensors."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.in_process import in_ranks
from util import full_tensor, make_trainable_optimizer

STEPS, CLIP_NORM, NAN_STEP = 6, 0.5, 3
MESHES = {"fsdp2": [0, 1], "hsdp": [[0, 1], [2, 3]]}


class Counts(TorchDispatchMode):
    """Counts operations on DTensors, and collectives."""

    def __init__(self):
        super().__init__()
        self.on_dtensors = self.collectives = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.on_dtensors += any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs)))
        self.collectives += "all_reduce" in func.name() or "allreduce" in func.name()
        return func(*args, **(kwargs or {}))


def update(rank, world, strategy):
    torch.manual_seed(0)
    # The last layer has fewer rows than there are shards: one is empty.
    layers = nn.Sequential(*(nn.Linear(4, rows) for rows in (8, 5, 1)))
    names = ("replicas", "shards")[-1 if strategy == "fsdp2" else 0 :]
    mesh = DeviceMesh("cpu", MESHES[strategy], mesh_dim_names=names)
    ours, theirs = layers, copy.deepcopy(layers)
    options = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    for module in (ours, theirs):
        fully_shard(module, mesh=mesh)
    optimizer = make_trainable_optimizer(ours, schedule=lambda step: 0.1 / (step + 1), clip_norm=CLIP_NORM, **options)
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.0, fused=True, **options)
    start = [full_tensor(param.detach()).clone() for param in ours.parameters()]
    results = {"norms": [], "reference norms": [], "skipped": []}
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for param, reference_param in zip(ours.parameters(), theirs.parameters(), strict=True):
            # The norm is below the limit in the last step, above it in the others.
            gradient = torch.randn(param.shape, generator=generator) * (0.01 if step == STEPS - 1 else 1.0)
            if step == NAN_STEP and mesh.get_local_rank(mesh.ndim - 1) == 0:  # in every replica
                gradient.fill_(torch.nan)
            rows = param.to_local().shape[0]
            first = mesh.get_local_rank(mesh.ndim - 1) * -(-param.shape[0] // 2)
            for to in (param, reference_param):
                local = gradient[first : first + rows].clone()
                to.grad = DTensor.from_local(
                    local, mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
                )
        with Counts() as counts:
            norm, skipped = optimizer.step(step)
        results["norms"].append(norm.item())
        results["skipped"].append(skipped.item())
        results["operations"] = [counts.on_dtensors, counts.collectives]
        with Counts() as counts:
            expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), CLIP_NORM, foreach=True)
            if step != NAN_STEP:
                reference.param_groups[0]["lr"] = 0.1 / (step + 1)
                reference.step()
        results["reference norms"].append(full_tensor(expected).item())
        results["reference on dtensors"] = counts.on_dtensors
    pairs = list(zip(ours.parameters(), theirs.parameters(), start, strict=True))
    results["difference"] = max((full_tensor(a - b)).abs().max().item() for a, b, _ in pairs)
    results["change"] = min((full_tensor(a.detach()) - c).abs().max().item() for a, _, c in pairs)
    moments = [(optimizer.optimizer.state[a], reference.state[b]) for a, b, _ in pairs]
    results["moments difference"] = max(
        full_tensor(a[key] - b[key]).abs().max().item() for a, b in moments for key in ("exp_avg", "exp_avg_sq")
    )
    results["steps"] = sorted({state["step"].item() for state, _ in moments})
    return results


@pytest.mark.parametrize("strategy, world", [("fsdp2", 2), ("hsdp", 4)])
def test_step_on_shards_equals_pytorchs_on_dtensors(strategy, world):
    for results in in_ranks(update, strategy, world=world):
        finite = [step for step in range(STEPS) if step != NAN_STEP]
        assert results["skipped"] == [float(step == NAN_STEP) for step in range(STEPS)]
        expected = [results["reference norms"][step] for step in finite]
        assert [results["norms"][step] for step in finite] == pytest.approx(expected, rel=1e-6)
        assert results["norms"][0] > CLIP_NORM > results["norms"][-1]
        assert results["difference"] < 1e-6 and results["moments difference"] < 1e-7 and results["change"] > 0.01
        assert results["steps"] == [STEPS - 1]
        # One sum for the norm, and no operation on DTensors.
        assert results["operations"] == [0, 1] and results["reference on dtensors"] > 0
