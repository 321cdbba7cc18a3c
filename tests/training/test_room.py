"""What fits which GPU, and what a run is told that does not."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

import vla
from tests import in_process
from tests.tiny import real_config
from vla_finetuning.config import PRESETS, parse_args
from vla_finetuning.training.memory import GIB
from vla_finetuning.training.room import CARDS_GIB, PRESET_CARDS, card_of, check_room, describe_memory, planned_memory

# Each takes what the preset it stands for takes, camera by camera.
ALIKE = {"h100": "a100", "b200": "h200"}
CASES = [
    pytest.param(preset, mode, cameras, marks=[] if (mode, cameras) == (own, 3) else pytest.mark.slow)
    for preset, flags in PRESETS.items()
    if preset in PRESET_CARDS and preset not in ALIKE
    for own in [flags["train.mode"]]
    # What trains more than the preset's own mode takes other flags: the refusal names them.
    for mode in ("heads", "expert", "full")[: ("heads", "expert", "full").index(own) + 1]
    for cameras in (1, 2, 3)
]


def run_of(preset, mode, cameras):
    """What the plan looks at of a run of PI0.5 at its real size, with frames of 480 x 640."""
    config = parse_args(
        [f"--preset={preset}", f"--train.mode={mode}", "--dataset.root=d", "--policy.type=pi05", "--output_dir=o"]
    )
    keys = [f"observation.images.{number}" for number in range(cameras)]
    features = {key: SimpleNamespace(shape=(480, 640, 3)) for key in keys}
    return SimpleNamespace(
        config=config,
        policy_config=real_config(cameras),
        match=SimpleNamespace(camera_keys=keys),
        metas=[SimpleNamespace(features=features)],
        prompts=(200,),
        image_size=None,
        use_gpu=True,
    )


@pytest.mark.parametrize(("preset", "mode", "cameras"), CASES)
def test_a_preset_is_planned_to_fit_with_4_gib_to_spare(preset, mode, cameras):
    needed = planned_memory(run_of(preset, mode, cameras)).needed
    for name in (preset, *(name for name, other in ALIKE.items() if other == preset)):
        assert needed / GIB + 4 <= CARDS_GIB[PRESET_CARDS[name]]


def test_presets_train_on_64_rows_and_those_alike_are():
    assert PRESET_CARDS.keys() == PRESETS.keys() - {"demo"}
    for preset in PRESET_CARDS:
        config = run_of(preset, PRESETS[preset]["train.mode"], 1).config
        assert (config.global_batch_size, config.grad_accum) == (64, 2 if preset == "l4" else 1)
    assert all(PRESETS[name] == PRESETS[other] for name, other in ALIKE.items())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    run = in_process.resolved(in_process.make_setting(tmp_path_factory.mktemp("room")), batch_size=8, grad_accum=1)
    return replace(run, config=replace(run.config, scaling=replace(run.config.scaling, use_gpu=True, num_workers=2)))


def test_a_run_that_does_not_fit_is_refused_with_what_does(tiny):
    needed = planned_memory(tiny)
    check_room(tiny, needed, needed.needed / GIB)
    with pytest.raises(
        ValueError, match="GiB per worker .planned., and the GPU found here has .*would fit with"
    ) as told:
        check_room(tiny, needed, (needed.needed - 1) / GIB)
    flags = str(told.value).partition("fit with ")[2].partition(";")[0].split(" ")
    values = dict(zip(flags[::2], flags[1::2], strict=True))
    config = replace(
        tiny.config,
        batch_size=int(values.get("--batch_size", 8)),
        grad_accum=int(values.get("--grad_accum", 1)),
        scaling=replace(tiny.config.scaling, strategy=values.get("--scaling.strategy", "ddp")),
    )
    assert planned_memory(tiny, config).needed < needed.needed
    with pytest.raises(ValueError, match="nor would it with smaller micro-batches"):
        check_room(tiny, needed, 0.1)


def test_whose_memory_counts(tiny):
    def of(accelerator_type=None, preset=None, **changes):
        scaling = replace(tiny.config.scaling, accelerator_type=accelerator_type, **changes)
        return replace(tiny, config=replace(tiny.config, scaling=scaling, preset=preset))

    assert card_of(of("L4", "h100"), 79.2) == ("L4", CARDS_GIB["L4"])
    assert card_of(of(None, "h100"), 22.5) == ("the GPU found here", 22.5)
    assert card_of(of(None, "h100"), None) == ("H100", CARDS_GIB["H100"])
    assert card_of(of("T4"), 15.0) is None and card_of(of(), None) is None
    assert card_of(of(None, "h100", use_gpu=False), 22.5) is None


def test_the_plan_says_what_fits(tiny):
    needed = replace(planned_memory(tiny), peak=50 * GIB, beside=4 * GIB)
    told = describe_memory(tiny, needed)
    assert "54.00 GiB planned: 50.00 at the worst moment" in told
    fits, small = told.partition("fits (planned): ")[2].split("; too small: ")
    assert "H100 (79.1 GiB)" in fits and "A100-40G (39.3 GiB)" in small and "L4" in small


def test_a_dry_run_shows_it_and_ends_with_the_refusal(tmp_path, monkeypatch, capsys):
    flags = in_process.flags(in_process.make_setting(tmp_path), **{"scaling.use_gpu": "true", "dry_run": "true"})
    assert vla.main(flags) == 0
    assert "fits (planned): L4 (22 GiB)" in capsys.readouterr().out
    monkeypatch.setattr(vla, "gpu_gib", lambda: 0.5)
    assert vla.main(flags) == 2
    assert "the GPU found here has 0.5" in capsys.readouterr().err
