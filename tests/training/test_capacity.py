"""Presets against the memory of their GPUs, and the error for a run that does not fit."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.utils.constants import ACTION

import vla
from tests import in_process
from vla_finetuning.cards import CARDS_GIB, OF_PRESET
from vla_finetuning.options.command_line import parse_args, parse_grpo
from vla_finetuning.options.programs import GRPO_PRESETS, PRESETS
from vla_finetuning.options.train import TrainMode
from vla_finetuning.plan.resolve import with_config
from vla_finetuning.policies.registry import family_of
from vla_finetuning.training import capacity
from vla_finetuning.training.capacity import card_of, check_capacity, describe_memory, planned_memory, planned_shards
from vla_finetuning.training.memory import GIB, StepMemory, step_memory

PATHS = ("--dataset.root=d", "--output_dir=o")
CAMERAS, FRAME, PROMPT = (1, 2, 3), (480, 640), 200
MODES = get_args(TrainMode)  # from the fewest trained parameters to the most


def modes_of(preset):
    """Return the preset's mode and those that train less."""
    return MODES[: MODES.index(PRESETS[preset]["train.mode"]) + 1]


def config_of(preset, mode):
    return parse_args([f"--preset={preset}", f"--train.mode={mode}", "--policy.type=pi05", *PATHS])


def plan_of_options(config, cameras):
    """Plan a worker's memory for PI0.5 at its real size from pretrained weights."""
    policy = PreTrainedConfig.get_choice_class("pi05")(device="cpu", pretrained_path=Path("pi05_base"))
    policy.output_features = {ACTION: PolicyFeature(FeatureType.ACTION, (policy.max_action_dim,))}
    policy = family_of(policy).with_cameras(policy, cameras, PROMPT)
    shards = planned_shards(config)
    return step_memory(policy, config, cameras=cameras, frames=[FRAME] * cameras, shard_workers=shards)


def plan_of_grpo(preset, cameras):
    """Plan a worker of `grpo.py`, whose micro-batches have all random steps of a row."""
    config = parse_grpo([f"--preset={preset}", "--policy.path=p", "--env.type=two_bins", "--output_dir=o"])
    training = config.training()
    train = replace(training.train, noise_draws=config.grpo.flow_steps)
    return plan_of_options(replace(training, train=train), cameras)


# Presets with the same options as another.
ALIKE = {"h100": "a100", "b200": "h200"}
QUICK = ("l4", modes_of("l4")[-1], 3)  # all other cases are slow
CASES = [
    pytest.param(preset, mode, n, marks=[] if (preset, mode, n) == QUICK else pytest.mark.slow)
    for preset in OF_PRESET
    if preset not in ALIKE
    for mode in modes_of(preset)
    for n in CAMERAS
]


@pytest.mark.parametrize(("preset", "mode", "cameras"), CASES)
def test_preset_fits_with_4_gib_to_spare(preset, mode, cameras):
    needed = plan_of_options(config_of(preset, mode), cameras).needed
    for name in (preset, *(name for name, other in ALIKE.items() if other == preset)):
        assert needed / GIB + 4 <= OF_PRESET[name].gib


# Presets other than l4 differ only in their card; a100_40's is the smallest.
@pytest.mark.parametrize("preset", ["l4", pytest.param("a100_40", marks=pytest.mark.slow)])
def test_preset_of_grpo_fits_with_4_gib_to_spare(preset):
    assert plan_of_grpo(preset, 3).needed / GIB + 4 <= OF_PRESET[preset].gib
    assert GRPO_PRESETS.keys() == PRESETS.keys()
    # RLinf's examples/embodiment/config/libero_10_grpo_openpi_pi05.yaml: actor.optim.lr, actor.global_batch_size.
    assert (GRPO_PRESETS[preset]["lr"], GRPO_PRESETS[preset]["grpo.minibatch"]) == ("5e-6", "2048")
    assert all(GRPO_PRESETS[other] == GRPO_PRESETS["a100_40"] for other in OF_PRESET if other != "l4")


def test_presets_have_their_global_batch_size_in_one_micro_step():
    assert OF_PRESET.keys() == PRESETS.keys() - {"demo"}
    rows = {"l4": 64, "a100_40": 128, "a100": 128, "h100": 128, "h200": 256, "b200": 256}
    configs = {preset: config_of(preset, PRESETS[preset]["train.mode"]) for preset in OF_PRESET}
    assert {preset: config.global_batch_size for preset, config in configs.items()} == rows
    assert {config.grad_accum for config in configs.values()} == {1}
    assert all(PRESETS[name] == PRESETS[other] for name, other in ALIKE.items())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    run = in_process.resolved(in_process.make_setting(tmp_path_factory.mktemp("room")), batch_size=2, grad_accum=1)
    return with_config(run, replace(run.config, scaling=replace(run.config.scaling, use_gpu=True, num_workers=2)))


@pytest.fixture(scope="module")
def planned(tiny):
    """Return a cached function from options to their plan."""
    plan, plans = planned_memory(tiny.policy, tiny.rows.frames), {}

    def cached(config):
        key = repr(config)
        if key not in plans:
            plans[key] = plan(config)
        return plans[key]

    return cached


def test_run_that_does_not_fit_is_refused_with_flags_that_fit(tiny, planned):
    needed = planned(tiny.config)
    check_capacity(tiny.config, needed, planned, needed.needed / GIB)
    with pytest.raises(ValueError, match="GiB per worker .planned., and the GPU found here .* fit with") as error:
        check_capacity(tiny.config, needed, planned, (needed.needed - 1) / GIB)
    flags = str(error.value).partition("fit with ")[2].partition(";")[0].split(" ")
    values = dict(zip(flags[::2], flags[1::2], strict=True))
    config = replace(
        tiny.config,
        batch_size=int(values.get("--batch_size", 2)),
        grad_accum=int(values.get("--grad_accum", 1)),
        scaling=replace(tiny.config.scaling, strategy=values.get("--scaling.strategy", "ddp")),
    )
    assert planned(config).needed < needed.needed
    with pytest.raises(ValueError, match="it would fit with (?!.*strategy)"):
        check_capacity(tiny.config, needed, planned, (needed.needed - 1) / GIB, "muon")
    with pytest.raises(ValueError, match="it would not fit with smaller micro-batches"):
        check_capacity(tiny.config, needed, planned, 0.1)
    with pytest.raises(ValueError, match="it would not fit with smaller micro-batches(?!.*sharded)"):
        check_capacity(tiny.config, needed, planned, 0.1, "muon")


def test_card_is_the_gpu_found_or_that_of_the_preset(tiny):
    def config_with(accelerator_type=None, preset=None, **changes):
        scaling = replace(tiny.config.scaling, accelerator_type=accelerator_type, **changes)
        return replace(tiny.config, scaling=scaling, preset=preset)

    assert card_of(config_with("L4", "h100"), 79.2) == ("L4", CARDS_GIB["L4"])
    assert card_of(config_with(None, "h100"), 22.5) == ("the GPU found here", 22.5)
    assert card_of(config_with(None, "h100"), None) == ("H100", CARDS_GIB["H100"])
    assert card_of(config_with("T4"), 15.0) is None and card_of(config_with(), None) is None
    assert card_of(config_with(None, "h100", use_gpu=False), 22.5) is None


def test_plan_counts_micro_batches_that_wait_for_an_exact_mean(tiny, planned):
    config, rows = replace(tiny.config, grad_accum=4), tiny.config.batch_size
    exact = planned(replace(config, train=replace(config.train, exact_mean=True)))
    policy = tiny.policy.config
    numbers = policy.chunk_size * policy.output_features[ACTION].shape[0]
    prompt = tiny.policy.prompts[-1]
    row_bytes = sum(height * width * 3 for height, width in tiny.rows.frames) + prompt * (8 + 1) + 4 * numbers
    assert exact.needed - planned(config).needed == 3 * rows * row_bytes and exact.peak == planned(config).peak


def test_plan_names_cards_that_fit_and_too_little_host_memory(tiny, planned, monkeypatch):
    needed = replace(planned(tiny.config), peak=50 * GIB, beside=4 * GIB)
    size = 12 * tiny.policy.parameters.trainable
    monkeypatch.setattr(capacity, "get_system_memory", lambda: size)
    plan = describe_memory(tiny.config, needed, tiny.policy.checkpoint_bytes)
    assert "54.00 GiB planned: 50.00 at the worst moment" in plan
    fits, small = plan.partition("fits (planned): ")[2].split("; too small: ")
    assert "H100 (79.1 GiB)" in fits and "A100-40G (39.3 GiB)" in small and "L4" in small
    assert f"{size / 1e9:.1f} GB for a checkpoint" in plan and "TOO LITTLE" not in plan
    monkeypatch.setattr(capacity, "get_system_memory", lambda: size - 1)
    assert "TOO LITTLE on this machine" in describe_memory(tiny.config, needed, tiny.policy.checkpoint_bytes)


@pytest.mark.parametrize("workers, gpus, planned", [(16, 0, 8), (12, 0, 6), (16, 4, 4), (2, 8, 2)])
def test_hsdp_is_planned_with_the_workers_of_a_node(tiny, monkeypatch, workers, gpus, planned):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(capacity, "is_local", lambda: True)
    scaling = replace(tiny.config.scaling, strategy="hsdp", num_workers=workers)
    config = replace(tiny.config, scaling=scaling)
    assert planned_shards(config) == planned
    assert planned_shards(replace(config, scaling=replace(scaling, shard_workers=1))) == 1
    plan = describe_memory(config, StepMemory(0, 0, 0, 0, 0, 0), 0)
    assert f"planned with {planned} workers on a node" in plan
    monkeypatch.setattr(capacity, "is_local", lambda: False)  # the head's GPUs are not the cluster's
    assert planned_shards(config) == max(n for n in range(1, 9) if workers % n == 0)


def test_suggested_flags_leave_out_shard_workers_without_hsdp(tiny):
    scaling = replace(tiny.config.scaling, strategy="hsdp", num_workers=4, shard_workers=2)
    suggestions = dict(capacity._smaller(replace(tiny.config, scaling=scaling), True, "adamw"))
    flags = "--scaling.strategy fsdp2 (without --scaling.shard_workers) --train.activation_checkpointing true"
    assert (suggestions[flags].scaling.strategy, suggestions[flags].scaling.shard_workers) == ("fsdp2", None)
    assert suggestions["--train.activation_checkpointing true"].scaling == scaling


def test_dry_run_shows_plan_or_refusal(tmp_path, monkeypatch, capsys):
    flags = in_process.flags(in_process.make_setting(tmp_path), **{"scaling.use_gpu": "true", "dry_run": "true"})
    assert vla.main(flags) == 0
    assert "fits (planned): L4 (22 GiB)" in capsys.readouterr().out
    monkeypatch.setattr(capacity, "card_of", lambda *_: ("the GPU found here", 0.5))
    assert vla.main(flags) == 2
    assert "the GPU found here has 0.5" in capsys.readouterr().err
