"""What a training process does around its steps, without Ray."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import compiling
import tiny_pi05
import worker
from config import parse_args
from lerobot_metadata import load_metadata
from pi05_loss import sample_noise_and_time
from run_plan import describe, resolve
from tests.datasets import make_dataset
from training_data import Dealt

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Two datasets and a tiny base policy for them."""
    folder = tmp_path_factory.mktemp("worker")
    roots = [make_dataset(folder / name, episodes=(9, 7), seed=seed) for seed, name in enumerate(("first", "second"))]
    meta = load_metadata(roots[0])
    sizes = {"width": 32, "depth": 2, "mlp_dim": 32, "head_dim": 8, "vision_width": 32, "vision_mlp_dim": 32}
    base = tiny_pi05.make_tiny_base(
        folder / "base", features=meta.features, tasks=list(meta.tasks.values()), stats=meta.stats, fps=10, **sizes
    )
    return folder, roots, base


def resolved(setting, **changes):
    folder, roots, base = setting
    options = {
        "dataset.root": ",".join(map(str, roots)),
        "policy.path": base,
        "output_dir": folder / "run",
        "batch_size": 4,
        "grad_accum": 2,
        "steps": 6,
        "scaling.use_gpu": "false",
        **changes,
    }
    return resolve(parse_args([f"--{name}={value}" for name, value in options.items()]), gpus_found=0)


def test_a_rows_draws_do_not_depend_on_who_computes_it(setting):
    """Noise and time by a row's place in the global batch: one worker with accumulation, or two."""

    def by_row(world, accum):
        options = {
            "train.noise_draws": 3,
            "scaling.num_workers": world,
            "grad_accum": accum,
            "scaling.use_gpu": "false",
        }
        run = replace(resolved(setting, **options), block_rows=2)
        found = {}
        for rank in range(world):
            dealt = Dealt(run.config.batch_size, run.block_rows, rank, world, run.batches_per_step)
            draws = worker.noise_for(run, 5, dealt, CPU)
            for micro in range(accum):
                noise, time = draws(micro)
                assert len(noise) == len(time) == 3 * run.config.batch_size
                for place, row in enumerate(dealt.rows(micro).tolist()):
                    found[row] = noise[3 * place : 3 * place + 3], time[3 * place : 3 * place + 3]
        return found, sample_noise_and_time(run.policy_config, 3 * 8, run.config.seed, 5, CPU)

    one, (noise, time) = by_row(1, 2)
    two, _ = by_row(2, 1)
    assert one.keys() == two.keys() == set(range(8))
    for row in range(8):
        for found in (one, two):
            assert torch.equal(found[row][0], noise[3 * row : 3 * row + 3])
            assert torch.equal(found[row][1], time[3 * row : 3 * row + 3])
    assert len(time.unique()) == 24


def test_too_many_steps_that_are_not_finite_name_the_rows(setting):
    run = resolved(setting, **{"train.max_nonfinite": 1, "log_freq": 2})
    metrics = {"nonfinite_steps": 1, "samples": 16}
    worker.check_finite(run, metrics, done=4)
    with pytest.raises(FloatingPointError, match="2 of the last 2 steps had a loss .*nonfinite=1; they") as error:
        worker.check_finite(run, {**metrics, "nonfinite_steps": 2}, done=4)

    # What the window's steps, the third and the fourth, were really fed.
    source = run.reader()(stream=(0, run.last_row))
    fed = list(source.read_rows(np.arange(16, 32), 4))
    expected = {
        root: {int(i) for batch in fed for d, i in zip(batch["dataset_index"], batch["index"], strict=True) if d == n}
        for n, root in enumerate(run.config.roots)
    }
    assert named_rows(str(error.value)) == expected and sum(map(len, expected.values())) == 16


def named_rows(message):
    named = {}
    for part in message.split("by `index`: ")[1].split("; "):
        root, runs = part.rsplit(": ", 1)
        bounds = [tuple(map(int, run.split("-"))) for run in runs.split(", ")]
        named[root] = {row for bound in bounds for row in range(bound[0], bound[-1] + 1)}
    return named


def test_a_batch_is_named_by_its_steps_rows(setting):
    run = resolved(setting, **{"scaling.num_workers": 2, "grad_accum": 1})
    dealt = Dealt(run.config.batch_size, run.block_rows, 1, 2, run.batches_per_step, first_step=1)
    told = worker.what_batch(run, dealt, 2)
    assert told.startswith("a batch of step 4 on rank 1; ")
    fed = list(run.reader()(stream=(0, run.last_row)).read_rows(np.arange(24, 32), 4))
    rows = {(d, i) for batch in fed for d, i in zip(batch["dataset_index"], batch["index"], strict=True)}
    assert {(run.config.roots.index(root), i) for root, named in named_rows(told).items() for i in named} == rows


def test_compiling_is_refused_with_a_reason_and_training_goes_on(setting, caplog, monkeypatch):
    run = resolved(setting, **{"train.compile": "true"})
    made = []
    monkeypatch.setattr(worker, "Compiler", lambda: made.append(1) or compiling.Compiler("eager"))
    with caplog.at_level(logging.WARNING):
        loss, autocast = worker.build_model(run, CPU)
    assert autocast is None and not made
    assert [record.getMessage() for record in caplog.records if record.name == "worker"] == [
        "--train.compile does nothing: the step runs on the CPU, and only GPUs gain from it"
    ]
    monkeypatch.setattr(worker, "why_not", lambda device: None)
    worker.build_model(run, CPU)
    assert made == [1]


def test_options_reach_the_loss(setting, monkeypatch):
    given = []

    class Loss(torch.nn.Module):
        def __init__(self, policy, **options):
            super().__init__()
            given.append(options)

    monkeypatch.setattr(worker, "PolicyLoss", Loss)
    flags = {"train.attention": "eager", "train.activation_checkpointing": "true", "train.mask_padding": "true"}
    worker.build_model(resolved(setting, **flags), CPU)
    worker.build_model(resolved(setting), CPU)
    wanted = ("attention", "checkpointing", "mask_padding", "compile")
    assert [[options[name] for name in wanted] for options in given] == [
        ["eager", True, True, None],
        ["sdpa", False, False, None],
    ]


def test_the_plan_of_a_dry_run_says_what_memory_a_step_takes(setting):
    plain, small = resolved(setting, dry_run="true"), resolved(setting, dry_run="true", **{"train.mode": "heads"})
    lines = [next(line for line in describe(run).splitlines() if line.startswith("Memory")) for run in (plain, small)]
    assert all("GiB at the worst moment" in line for line in lines)
    assert "Memory" not in describe(replace(plain, config=replace(plain.config, dry_run=False)))


@pytest.mark.parametrize(
    "flag, value",
    [("mask_padding", True), ("noise_draws", 2), ("activation_checkpointing", True), ("compile", True)],
)
def test_what_is_for_pi05_is_refused_for_other_policies(setting, flag, value):
    changes = {"policy.path": None, "policy.type": "act", "train.mode": "full", f"train.{flag}": str(value).lower()}
    folder, roots, _ = setting
    options = {"dataset.root": roots[0], "output_dir": folder / "act", "batch_size": 2, "steps": 1, **changes}
    flags = [f"--{name}={given}" for name, given in options.items() if given is not None]
    with pytest.raises(ValueError, match=f"--train.{flag}={value} is for PI0.5, and the policy is of type act"):
        resolve(parse_args(flags), gpus_found=0)


def test_flops_share_needs_a_known_gpu(setting, monkeypatch):
    run = SimpleNamespace(flops_per_sample=10**12)
    assert worker.flops_share(run, 2, CPU) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert worker.flops_share(run, 2, torch.device("cuda", 0)) == pytest.approx(1e12 / (2 * 989.5e12), rel=1e-3)
