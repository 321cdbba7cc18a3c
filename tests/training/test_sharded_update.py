"""The optimizer's step on shards, beside PyTorch's own clipping and AdamW of DTensors."""

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


class Seen(TorchDispatchMode):
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
    # A row less than there are shards, too: then one is empty.
    layers = nn.Sequential(*(nn.Linear(4, rows) for rows in (8, 5, 1)))
    names = ("replicas", "shards")[-1 if strategy == "fsdp2" else 0 :]
    mesh = DeviceMesh("cpu", MESHES[strategy], mesh_dim_names=names)
    ours, theirs = layers, copy.deepcopy(layers)
    options = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    for module in (ours, theirs):
        fully_shard(module, mesh=mesh)
    mine = make_trainable_optimizer(ours, schedule=lambda step: 0.1 / (step + 1), clip_norm=CLIP_NORM, **options)
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.0, fused=True, **options)
    start = [full_tensor(param.detach()).clone() for param in ours.parameters()]
    found = {"norms": [], "skipped": []}
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            # Below the norm that is clipped in the last step, above it in the others.
            gradient = torch.randn(param.shape, generator=generator) * (0.01 if step == STEPS - 1 else 1.0)
            if step == NAN_STEP and mesh.get_local_rank(mesh.ndim - 1) == 0:  # in every replica
                gradient.fill_(torch.nan)
            rows = param.to_local().shape[0]
            first = mesh.get_local_rank(mesh.ndim - 1) * -(-param.shape[0] // 2)
            for to in (param, other):
                own = gradient[first : first + rows].clone()
                to.grad = DTensor.from_local(
                    own, mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
                )
        with Seen() as seen:
            norm, skipped = mine.step(step)
        found["norms"].append(norm.item())
        found["skipped"].append(skipped.item())
        found["seen"] = [seen.on_dtensors, seen.collectives]
        with Seen() as seen:
            expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), CLIP_NORM, foreach=True)
            if step != NAN_STEP:
                reference.param_groups[0]["lr"] = 0.1 / (step + 1)
                reference.step()
        found.setdefault("theirs", []).append(full_tensor(expected).item())
        found["seen by theirs"] = seen.on_dtensors
    pairs = list(zip(ours.parameters(), theirs.parameters(), start, strict=True))
    found["apart"] = max((full_tensor(a - b)).abs().max().item() for a, b, _ in pairs)
    found["moved"] = min((full_tensor(a.detach()) - c).abs().max().item() for a, _, c in pairs)
    moments = [(mine.optimizer.state[a], reference.state[b]) for a, b, _ in pairs]
    found["moments apart"] = max(
        full_tensor(a[key] - b[key]).abs().max().item() for a, b in moments for key in ("exp_avg", "exp_avg_sq")
    )
    found["steps"] = sorted({state["step"].item() for state, _ in moments})
    return found


@pytest.mark.parametrize("strategy, world", [("fsdp2", 2), ("hsdp", 4)])
def test_a_step_on_shards_is_pytorchs_own_on_dtensors(strategy, world):
    for found in in_ranks(update, strategy, world=world):
        finite = [step for step in range(STEPS) if step != NAN_STEP]
        assert found["skipped"] == [float(step == NAN_STEP) for step in range(STEPS)]
        assert [found["norms"][n] for n in finite] == pytest.approx([found["theirs"][n] for n in finite], rel=1e-6)
        assert found["norms"][0] > CLIP_NORM > found["norms"][-1]
        assert found["apart"] < 1e-6 and found["moments apart"] < 1e-7 and found["moved"] > 0.01
        assert found["steps"] == [STEPS - 1]
        # One sum for the norm, and nothing that takes DTensors apart.
        assert found["seen"] == [0, 1] and found["seen by theirs"] > 0
