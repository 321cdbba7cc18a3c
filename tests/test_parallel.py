"""Parameters in parts, on two processes: the same losses as with copies, and really in parts."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import parallel
import worker
from diagnostics import compare_strategies
from diagnostics.compare_strategies import StrategiesReport
from diagnostics.report import Environment
from parallel import spread
from tests import in_process

# Two processes that import LeRobot and train 23 steps three times: 35 CPU seconds.
pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
STRATEGIES = ("ddp", "fsdp2", "fsdp2_reshard")


def in_parts(module):
    return [isinstance(p, DTensor) for p in module.parameters() if p.requires_grad]


def two(rank, run, folder):
    """What each of the two processes does; it leaves what it found in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {"result": compare_strategies.compare(run, STRATEGIES, 20, rank, 2, CPU).model_dump()}
    dealt = compare_strategies.Dealt(run.config.batch_size, run.block_rows, rank, 2, run.batches_per_step)
    (host,) = compare_strategies.host_batches(run, dealt, 1)
    (batch,) = worker.policy_batches(run, [host], dealt)
    for strategy in ("fsdp2", "fsdp2_reshard"):
        loss, _ = worker.build_model(run, CPU)
        total = sum(p.numel() for p in loss.parameters() if p.requires_grad)
        spread(loss, strategy, CPU, 2)
        held = sum(p.to_local().numel() for p in loss.parameters() if p.requires_grad)
        units = parallel.units(loss)
        during = []
        last = loss.policy.model.action_out_proj
        last.register_forward_pre_hook(lambda *_, u=units, d=during: d.extend(any(in_parts(m)) for m in u))
        value = loss(batch, *worker.noise_for(run, 0, dealt, CPU)(0))
        value.backward()
        found[strategy] = {
            "share": held / total,
            "units": len(units),
            "in parts at the end of forward": during,
            "in parts between steps": all(in_parts(loss)),
            "gradients in parts": all(isinstance(p.grad, DTensor) for p in loss.parameters() if p.requires_grad),
        }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    run = in_process.resolved(
        in_process.make_setting(folder), **{"scaling.num_workers": 2, "steps": 23, "lr": 1e-3, "warmup_frac": 0}
    )
    torch.multiprocessing.spawn(two, args=(run, folder), nprocs=2)
    return run, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_losses_are_those_of_copies(found):
    for rank in found[1]:
        ddp, *others = [s["losses"] for s in rank["result"]["spreadings"]]
        assert len(ddp) == 23 and sum(ddp[-5:]) < 0.9 * sum(ddp[:5])
        for losses in others:
            # Sums in another order; Adam makes more of that with every step.
            assert losses == pytest.approx(ddp, rel=1e-3)
            assert losses[:3] == pytest.approx(ddp[:3], rel=1e-5)


def test_parameters_are_in_parts_between_steps(found):
    for rank in found[1]:
        for strategy in ("fsdp2", "fsdp2_reshard"):
            seen = rank[strategy]
            assert seen["in parts between steps"] and seen["gradients in parts"]
            assert seen["share"] == pytest.approx(0.5, abs=0.02)
        ddp, *others = [s["state_bytes"] for s in rank["result"]["spreadings"]]
        assert all(held < 0.6 * ddp for held in others)


def test_units_are_gathered_and_given_up_one_at_a_time(found):
    """Their hooks fire: at the end of forward they are whole in one strategy, in parts again in the other."""
    for rank in found[1]:
        # Two layers: MLPs of the expert's, and of the language model's that is used; the vision tower's two layers.
        assert rank["fsdp2"]["units"] == 2 + 1 + 2
        assert rank["fsdp2"]["in parts at the end of forward"] == [False] * 5
        # The innermost is the expert's last, which may be kept for the backward that follows at once.
        assert sum(rank["fsdp2_reshard"]["in parts at the end of forward"]) >= 4


def test_one_process_has_nothing_to_spread(found):
    loss = torch.nn.Linear(2, 2)
    assert spread(loss, "fsdp2", CPU, 1) is loss


def test_the_table_and_the_options(found, capsys, monkeypatch):
    run, ranks = found
    results = [compare_strategies.RankStrategies.model_validate(rank["result"]) for rank in ranks]
    report = StrategiesReport(
        environment=Environment.here(),
        config=run.config.to_json(),
        world_size=2,
        global_batch_size=run.config.global_batch_size,
        ranks=results,
    )
    lines = compare_strategies.table(report).splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.startswith(STRATEGIES)}
    assert list(rows) == list(STRATEGIES)
    assert rows["ddp"][3] == "1.00x" and float(rows["ddp"][-1]) == 0 < float(rows["fsdp2"][-1]) < 1e-3
    monkeypatch.setenv("STRATEGIES", "fsdp2,ddp")
    monkeypatch.setenv("COMPARE_STEPS", "3")
    options = compare_strategies.parse_options([])[0]
    assert (options.strategies, options.compare_steps) == (["fsdp2", "ddp"], 3)
    assert compare_strategies.main(["--strategies=zero3"]) == 2
    assert "'zero3' is none of ddp, fsdp2, fsdp2_reshard" in capsys.readouterr().err
    assert compare_strategies.main(["--preset=demo", "--scaling.num_workers=1"]) == 2
    assert "give at least 2" in capsys.readouterr().err
