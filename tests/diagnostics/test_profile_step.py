"""The step profiler, against planted times, unprofiled training and numpy."""

import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch.autograd import DeviceType

from diagnostics import profile_step, step_clock
from diagnostics.profile_step import parse_options
from diagnostics.report import page
from diagnostics.step_report import Settings, StepReport, _summarise_phase, advice, judge
from tests import in_process
from tests.pages import check_page
from util import DeviceMetrics, TrainableOptimizer
from vla_finetuning.plan.resolve import with_config
from vla_finetuning.policies.families.pi05 import PI05Loss
from vla_finetuning.report import figures
from vla_finetuning.training import state
from vla_finetuning.training.model import build_model, build_optimizer


def watched_run(run, folder, *argv):
    """Return the settings of a command line, and the run that is profiled into a folder."""
    settings = Settings.of(parse_options(["--profile_warmup=1", "--profile_steps=3", *argv])[0], run)
    watched = profile_step.watched_run(run, settings)
    return settings, with_config(watched, replace(watched.config, output_dir=str(folder)))


def profile_worker(settings, watched, shard=None, **options):
    """Profile in this process; return the profile of the rank."""

    def profile(run, worker, **more):
        profile_step.profile_worker(run, settings, worker, **more)

    in_process.train(watched, shard, by=profile, **options)
    return profile_step.RankProfile.model_validate_json((watched.job.output_dir / "rank-0.json").read_bytes())


def profile(run, folder, *argv, before_batch=lambda: None):
    """Profile in this process as the tool does."""
    settings, watched = watched_run(run, folder, *argv)
    rank = profile_worker(settings, watched, in_process.Shard(watched, before_batch))
    return profile_step.summarise(run, settings, [rank])


@pytest.fixture(scope="module")
def report(run, tmp_path_factory):
    return profile(run, tmp_path_factory.mktemp("report"), "--profile_sync")


# --- measurements -----------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass for the profiler only when a test says so."""
    clock = in_process.GivenTime()
    monkeypatch.setattr(step_clock, "time", clock)
    return clock


def delayed(function, spend):
    def slow(*args, **options):
        spend()
        return function(*args, **options)

    return slow


def slow_backward(function, spend):
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, gradient):
            spend()
            return gradient

    return lambda *args: Backward.apply(function(*args))


# phase: what takes time, how, how long a call takes (no two sums are equal), and how often a step calls it
PLANTED = {
    "forward": (PI05Loss, "forward", delayed, 1, 2),
    "backward": (PI05Loss, "forward", slow_backward, 2, 2),
    "clip": (torch.nn.utils, "get_total_norm", delayed, 8, 1),
    "optimizer": (torch.optim.AdamW, "step", delayed, 16, 1),
    "zero_grad_schedule": (torch.optim.AdamW, "zero_grad", delayed, 32, 1),
    "metrics": (DeviceMetrics, "add_step", delayed, 64, 1),
    "other": (state, "noise_for", delayed, 128, 1),
}


def test_planted_time_is_attributed_to_its_phase(run, tmp_path, monkeypatch, clock):
    """Also that of waiting for data, 256 s a batch; phases sum to the step exactly."""
    expected = {"data_wait": 2.0 * 256}
    for phase, (owner, name, wrap, seconds, times) in PLANTED.items():
        monkeypatch.setattr(owner, name, wrap(getattr(owner, name), partial(clock.spend, seconds)))
        expected[phase] = float(seconds * times)
    (rank,) = profile(run, tmp_path, "--profile_sync", before_batch=lambda: clock.spend(256)).ranks
    assert rank.timed.exposed == {phase: [seconds] * 3 for phase, seconds in expected.items()}
    assert rank.synchronized.exposed == rank.timed.exposed
    assert rank.block_step_s == dict.fromkeys(("untouched", "timed", "synchronized"), [sum(expected.values())] * 3)


def test_advice_is_sorted_by_share_and_ignores_rare_slow_blocks(report):
    """A few slow blocks are no finding: another program took the machine."""
    shares = dict.fromkeys(report.phases, (0.0, 0.0)) | {"forward": (0.5, 0.4), "data_wait": (0.16, 0.01)}

    def advised():
        phases = {
            name: report.phases[name].model_copy(update={"share": share, "quartiles": (lower, 1.0)})
            for name, (share, lower) in shares.items()
        }
        return [line[:26] for line in advice(report.model_copy(update={"phases": phases}))]

    assert advised() == ["Forward and backward are 5"]
    shares |= {"data_wait": (0.6, 0.55), "optimizer": (0.7, 0.15)}
    assert advised() == ["The optimizer is 70% of a ", "Waiting for data is 60% of"]


def test_share_quartiles_are_computed_over_blocks(run, report):
    """Over blocks of two steps, by numpy."""
    forward, wait = [1.0, 1, 2, 2, 3, 3, 4, 4], [1.0, 3, 1, 3, 1, 3, 1, 3]
    zeros = dict.fromkeys(report.ranks[0].timed.exposed, [0.0] * 8)
    timed = step_clock.Times(exposed=zeros | {"forward": forward, "data_wait": wait}, full=zeros)
    rank = report.ranks[0].model_copy(update={"timed": timed})
    of_blocks = np.array([2, 4, 6, 8]) / (np.array([2, 4, 6, 8]) + 4)
    summary = _summarise_phase("forward", 2, [rank])
    assert summary.quartiles == pytest.approx(np.quantile(of_blocks, (0.25, 0.75))) and summary.share == 20 / 36


def test_checkpoint_time_is_separate_from_phases(run, tmp_path, clock):
    calls = []

    class Writer(in_process.NoCheckpoints):
        def save(self, progress):
            calls.append(progress.step)
            clock.spend(8)

    settings, watched = watched_run(run, tmp_path, "--profile_steps=2")
    rank = profile_worker(settings, watched, make_checkpoints=Writer)
    assert calls == [1 + 2 + 2 + 1]
    assert rank.checkpoint_s == 8
    assert "checkpoint" not in rank.timed.exposed


def test_profiled_training_is_bitwise_equal(run, tmp_path):
    settings, watched = watched_run(run, tmp_path, "--profile_steps=2")
    clock = step_clock.StepClock(settings.passes(1), settings.block_steps, torch.device("cpu"))

    class StopAfterPasses(state.Callback):
        def on_step_end(self, training):
            training.stop = training.step == len(settings.passes(1))

    profiled = in_process.train(watched, callbacks=[clock], clock=clock).named()
    plain = in_process.train(watched, callbacks=[StopAfterPasses()]).named()
    assert all(torch.equal(profiled[name], plain[name]) for name in profiled)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_hidden_communication_is_overlap_with_computation(device):
    """Collectives at 0-4, 2-6 and 10-12 us; computation at 5-7 and at 11-20: 2 of 8 us are hidden."""
    kind = {"cpu": DeviceType.CPU, "cuda": DeviceType.CUDA}[device]
    collective, compute = {
        "cpu": ("gloo:all_reduce", "aten::mm"),
        "cuda": ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "sm90_xmma_gemm"),
    }[device]

    def event(name, start, end, **more):
        default = {"device_type": kind, "thread": 1, "is_user_annotation": False}
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), **default | more)

    events = [
        *(event(collective, start, end, thread=2) for start, end in ((10, 12), (0, 4), (2, 6))),
        *(event(compute, start, end) for start, end in ((5, 7), (5.5, 6.5), (11, 20))),
        # No computation: waiting on the host, the thread of a Gloo collective, and FSDP's annotations.
        event("RegisterPostBackwardFunctionBackward", 0, 20, device_type=DeviceType.CPU),
        event("aten::div_", 3, 4, thread=2, device_type=DeviceType.CPU),
        event("FSDP::post_backward_reduce", 0, 12, is_user_annotation=True),
        event("nccl:all_gather", 20, 30, is_user_annotation=True),
    ]
    total, hidden = step_clock.communication_times(events, torch.device(device))
    assert total == pytest.approx(8e-6)
    assert hidden == pytest.approx(2e-6)
    assert step_clock.communication_times(events[3:6], torch.device(device)) == (0, 0)


def test_passes_alternate_in_blocks(run):
    long = replace(run, config=replace(run.config, log_freq=50))
    settings = Settings.of(parse_options(["--profile_steps=20", "--profile_warmup=3", "--profile_sync"])[0], long)
    assert (settings.block_steps, settings.steps, settings.warmup) == (4, 20, 4)
    plan = settings.passes(world=2)
    blocks = plan[4:64:4]
    assert plan[4:64] == [name for name in blocks for _ in range(4)]
    assert blocks[:6] == ["untouched", "timed", "synchronized", "timed", "synchronized", "untouched"]
    assert plan[64:] == ["communication"] * 6 + ["checkpoint"]
    watched = profile_step.watched_run(long, settings)
    assert (watched.config.log_freq, watched.config.save_freq, watched.job.steps) == (4, 65, 66)
    tracing = settings.model_copy(update={"trace": True, "checkpoint": False})
    assert tracing.passes(world=2)[:5] == ["traced"] * 3 + ["warmup", "untouched"]
    assert profile_step.watched_run(with_config(long, long.config, 10**6), tracing).job.steps == 10**6


# --- options ----------------------------------------------------------------------------------------------


def test_environment_variables_set_options(run, monkeypatch):
    default = Settings.of(parse_options([])[0], run)
    assert (default.steps, default.warmup, default.fused_adamw, default.checkpoint) == (100, 20, True, True)
    variables = {
        "PROFILE_STEPS": ("7", {"steps": 7, "block_steps": 1}),
        "PROFILE_WARMUP": ("23", {"warmup": 40}),
        "PROFILE_SYNC": ("true", {"sync": True}),
        "PROFILE_NO_OPTIM": ("1", {"no_optim": True, "checkpoint": False}),
        "FIND_UNUSED_PARAMS": ("true", {"find_unused_params": True}),
        "FUSED_ADAMW": ("false", {"fused_adamw": False}),
        "PROFILE_CHECKPOINT": ("0", {"checkpoint": False}),
        "PROFILE_TRACE": ("t.json", {"trace": True}),
    }
    for name, (value, changed) in variables.items():
        with monkeypatch.context() as environment:
            environment.setenv(name, value)
            settings = Settings.of(parse_options([])[0], run).model_dump()
        assert settings == default.model_dump() | changed, name
    monkeypatch.setenv("PROFILE_STEPS", "9")
    assert parse_options(["--profile_steps", "4"])[0].profile_steps == 4  # the flag wins


@pytest.mark.parametrize(("argv", "search"), [([], None), (["--find_unused_params"], True)])
def test_find_unused_params_reaches_ddp(run, tmp_path, monkeypatch, argv, search):
    spread = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr("vla_finetuning.training.state.spread", spread)
    with pytest.raises(InterruptedError):
        profile_worker(*watched_run(run, tmp_path, *argv))
    assert spread.call_args.kwargs["find_unused_parameters"] is search


def test_fused_adamw_and_no_optim_settings(run, tmp_path, monkeypatch):
    loss, _ = build_model(run.policy, torch.device("cpu"))
    plain = Settings.of(parse_options([])[0], run)
    assert profile_step.make_optimizer(plain, run.policy, loss, run.job.steps).optimizer.param_groups[0]["fused"]

    foreach = plain.model_copy(update={"fused_adamw": False})
    unfused = profile_step.make_optimizer(foreach, run.policy, loss, run.job.steps)
    fused = build_optimizer(run.policy, loss, run.job.steps)
    expected = [group | {"fused": False, "foreach": True} for group in fused.optimizer.param_groups]
    assert unfused.optimizer.param_groups == expected
    before = {name: value.clone() for name, value in unfused.named().items()}
    for parameter in unfused.params:
        parameter.grad = torch.ones_like(parameter)
    unfused.step(0)
    assert any(not torch.equal(value, before[name]) for name, value in unfused.named().items())

    monkeypatch.setattr(TrainableOptimizer, "step", lambda *_: pytest.fail("the optimizer was used"))
    report = profile(run, tmp_path, "--profile_no_optim")
    assert not report.phases.keys() & {"clip", "optimizer", "zero_grad_schedule"}


@pytest.mark.parametrize(
    ("argv", "environment", "message"),
    [
        (["--profile_steps", "0"], {}, "argument --profile_steps: expected a positive number, found '0'"),
        ([], {"PROFILE_STEPS": "many"}, "PROFILE_STEPS='many' in the environment: expected a positive number"),
        (["--compare", "a.json", "b.json"], {}, "a.json does not exist; a run of the tool writes it"),
        (["--compare", "a.json", "b.json", "--html=page.html"], {}, "--compare takes two results, and no other flags"),
    ],
)
def test_invalid_options_exit_with_status_2(argv, environment, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert profile_step.main([*argv, "--preset", "demo"] if "--compare" not in argv else argv) == 2
    assert message in capsys.readouterr().err


def test_unfused_adamw_is_refused_for_shards_and_other_optimizers(run):
    """A single worker has no shards."""
    options, _ = parse_options(["--fused_adamw=false"])

    def prepare(workers):
        scaling = replace(run.config.scaling, strategy="fsdp2", num_workers=workers)
        return profile_step.prepare(replace(run, config=replace(run.config, scaling=scaling)), options)

    with pytest.raises(ValueError, match="--fused_adamw=false: the shards of --scaling.strategy=fsdp2 are updated by"):
        prepare(2)
    assert prepare(1)
    for name in ("sgd", "muon"):
        recipe = replace(run.policy.recipe, optimizer=SimpleNamespace(type=name))
        with pytest.raises(ValueError, match=f"--fused_adamw=false: the run's optimizer is {name}, not AdamW"):
            profile_step.prepare(replace(run, policy=replace(run.policy, recipe=recipe)), options)


# --- results ----------------------------------------------------------------------------------------------


def test_step_json_round_trip_refuses_other_schemas(report, tmp_path):
    report.write(tmp_path / "a.json")
    assert StepReport.read(tmp_path / "a.json") == report
    raw = json.loads((tmp_path / "a.json").read_text())
    assert {"cpu", "cores", "gpus", "driver", "git_revision", "versions", "date"} <= raw["environment"].keys()
    forward = raw["ranks"][0]["timed"]["full"]["forward"]
    assert raw["phases"]["forward"]["full"]["p95"] == pytest.approx(np.percentile(forward, 95))

    for damage in ({"schema_version": 2}, {"surprise": 1}):
        (tmp_path / "bad.json").write_text(json.dumps(raw | damage))
        with pytest.raises(ValueError, match=r"bad.json is no result of this version's profile_step"):
            StepReport.read(tmp_path / "bad.json")


def test_slowest_rank_is_reported(run, report):
    (rank,) = report.ranks
    slow = {name: [3 * x for x in blocks] for name, blocks in rank.block_step_s.items()}
    times = rank.timed.model_copy(update={"full": {p: [2 * x for x in v] for p, v in rank.timed.full.items()}})
    other = rank.model_copy(update={"rank": 1, "block_step_s": slow, "timed": times})
    both = profile_step.summarise(run, report.settings, [rank, other])
    assert both.world_size == 2
    assert both.untouched_s == pytest.approx(2 * report.untouched_s)  # the mean of 1 and 3
    assert both.phases["backward"].slowest_rank == 1
    assert both.phases["backward"].slowest_rank_mean == pytest.approx(2 * report.phases["backward"].full.mean)
    assert f"1: {2e3 * report.phases['backward'].full.mean:.2f} ms" in profile_step.table(both)


def test_hidden_time_is_full_minus_exposed_time(run, report):
    (rank,) = report.ranks
    full = rank.timed.full | {"data_wait": [x + 0.05 for x in rank.timed.full["data_wait"]]}
    rank = rank.model_copy(update={"timed": rank.timed.model_copy(update={"full": full})})
    hiding = profile_step.summarise(run, report.settings, [rank])
    assert hiding.hidden_s == pytest.approx(0.05)
    assert ": 50.0 ms hidden by overlap" in profile_step.table(hiding)
    assert ": 0.0 ms hidden by overlap" in profile_step.table(report)


def test_comparison_verdict_accounts_for_spread():
    rng = np.random.default_rng(0)
    quiet, loud = 1 + 0.005 * rng.standard_normal(8), 1 + 0.2 * rng.standard_normal(8)
    clear, unclear = judge(quiet, 1.05 * quiet[::-1]), judge(loud, 1.05 * loud[::-1])
    assert 1 < clear.low < 1.05 < clear.high
    assert str(clear).startswith("B is 1.05x slower")
    assert unclear.low < 1 < unclear.high
    assert str(unclear).startswith("no difference that these blocks can show")
    with pytest.raises(ValueError, match="more --profile_steps"):
        judge([1.0], [1.0])


def test_compare_prints_differing_options_and_ratio(report, tmp_path, capsys):
    report = report.model_copy(update={"step_s": {name: [0.1, 0.101, 0.102] for name in report.step_s}})
    slower = {name: [2 * x for x in blocks] for name, blocks in report.step_s.items()}
    settings = report.settings.model_copy(update={"fused_adamw": False})
    other = report.model_copy(update={"step_s": slower, "settings": settings, "config": report.config | {"seed": 7}})
    report.write(tmp_path / "a.json")
    other.write(tmp_path / "b.json")
    assert profile_step.main(["--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert [line.split() for line in lines[:2]] == [
        ["profile", "fused_adamw", "A", "True", "B", "False"],
        ["--seed", "A", "1000", "B", "7"],
    ]
    assert "B is 2.00x slower" in printed
    assert math.isclose(float(next(line for line in lines if line.startswith("step, untouched")).split()[-1]), 2.0)


def test_trace_events_share_one_clock(tmp_path):
    torch_trace = {
        "baseTimeNanoseconds": 1_000_000_000_000,
        "traceEvents": [{"ph": "X", "ts": 5.0, "dur": 10.0, "name": "forward"}, {"ph": "M", "name": "process_name"}],
    }
    tasks = [{"ph": "X", "ts": t, "dur": 3.0, "name": f"task at {t}"} for t in (1e9 - 50, 1e9 + 4, 1e9 + 100)]
    (tmp_path / "torch.json").write_text(json.dumps(torch_trace))
    profile_step.write_trace(tmp_path / "torch.json", tasks, tmp_path / "out" / "trace.json")
    events = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    assert [(e["name"], e.get("ts")) for e in events] == [
        ("forward", 1e9 + 5),
        ("process_name", None),
        ("task at 1000000004.0", 1e9 + 4),
    ]


def test_page_charts_every_step(report):
    html = page("A step", "two cores", profile_step.charts(report), profile_step.table(report))
    shares, steps = [svg["aria-label"] for svg in check_page(html).all("svg")]
    assert (
        shares.startswith("Shares: data_wait ") and steps == f"Milliseconds of every step: {', '.join(report.phases)}"
    )
    assert "ms untouched" in check_page(html).text and "two cores" in check_page(html).text
    values = {"forward": np.array([1.0, 2, 4]), "backward": np.array([3.0, 1, 0])}
    bottom, top = figures.stack(values, xlabel="step", ylabel="ms").axes[0].collections
    for drawn, expected in ((bottom, [1, 2, 4]), (top, [4, 3, 4])):
        assert set(expected) <= set(drawn.get_paths()[0].vertices[:, 1].tolist())


class At:
    """A CUDA event of a known time, in seconds."""

    def __init__(self, at_s):
        self.at_s = at_s

    def elapsed_time(self, end):
        return 1e3 * (end.at_s - self.at_s)


def test_gpu_phases_separate_exposed_from_hidden_time():
    """The GPU is busy until 1.4 s, while the host waits for a batch and another stream copies it."""
    marks = [
        # phase, time on the host, on the computing stream, on the copying stream
        ("other", 0.0, 0.0, None),
        ("data_wait", 0.1, 1.4, None),
        ("copy", 1.1, 1.4, 1.1),
        ("copy", 1.1, 1.4, 1.5),
        ("forward", 1.1, 1.5, None),
        (None, 1.2, 3.5, None),
    ]
    exposed, full = step_clock._phases(
        [step_clock._Mark(p, host, At(gpu), None if side is None else At(side)) for p, host, gpu, side in marks]
    )
    assert exposed == pytest.approx({"other": 1.4, "data_wait": 0.0, "copy": 0.1, "forward": 2.0})
    assert full == pytest.approx({"other": 1.4, "data_wait": 1.0, "copy": 0.4, "forward": 2.0})
    assert sum(exposed.values()) == pytest.approx(3.5)


def test_cuda_events_are_read_after_synchronize(run, tmp_path, monkeypatch):
    calls, device = [], torch.device("cuda", 0)
    monkeypatch.setattr(profile_step.vla, "train", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("synchronize"))
    monkeypatch.setattr(step_clock.StepClock, "times", lambda self, name: calls.append(name))
    settings, watched = watched_run(run, tmp_path)
    with pytest.raises(AssertionError):  # there are no times
        profile_step.profile_worker(watched, settings, SimpleNamespace(rank=0, world=1, device=device))
    assert calls == ["synchronize", "timed", "checkpoint"]


@pytest.mark.gpu
def test_cuda_event_times_agree_with_synchronized_times(tmp_path_factory, tmp_path):
    """In phases without overlap."""
    setting = in_process.make_setting(tmp_path_factory.mktemp("gpu"))
    run = in_process.resolved(setting, **{"scaling.use_gpu": "true", "batch_size": 4})
    options = ["--profile_steps=20", "--profile_warmup=5", "--profile_sync", "--profile_checkpoint=false"]
    settings, watched = watched_run(run, tmp_path, *options)
    rank = profile_worker(settings, watched, device=torch.device("cuda", 0))
    for phase in ("forward", "backward"):
        events, waited = (np.median(times.exposed[phase]) for times in (rank.timed, rank.synchronized))
        # A synchronize costs time, and drains the queue of the device.
        assert 0.3 * waited < events < 1.2 * waited
    assert "copy" in rank.timed.full and rank.peak_allocated_bytes > 0
    total = sum(map(sum, rank.timed.exposed.values())) / settings.steps
    assert total == pytest.approx(np.mean(rank.block_step_s["timed"]), rel=0.05)
