"""Plan notes where options overrule the base's config.json."""

import re
import shutil

import pytest

from tests import in_process
from tests.datasets import edit_json, make_dataset
from tests.in_process import resolved
from tests.training.test_as_lerobot import resolved as resolved_from_nothing
from tests.training.test_as_lerobot import resolved_from
from vla_finetuning.plan.describe import describe
from vla_finetuning.policies.saving import save_pretrained


@pytest.fixture
def changed(setting, tmp_path):

    def change(**values):
        folder, root, base = setting
        copy = shutil.copytree(base, tmp_path / f"base-{len(list(tmp_path.iterdir()))}")
        edit_json(copy / "config.json", lambda config: config.update(values))
        return folder, root, copy

    return change


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return in_process.make_setting(tmp_path_factory.mktemp("overruled"))


def notes_of(run):
    plan = describe(run)
    return [line.removeprefix("Note").strip() for line in plan.splitlines() if "config.json" in line]


def test_plan_notes_overruled_freeze_options_of_base(changed):
    frozen = changed(freeze_vision_encoder=True, train_expert_only=True)
    full, plain = resolved(frozen), resolved(changed())
    assert full.policy.parameters.trainable == plain.policy.parameters.trainable and not notes_of(plain)
    line = "train_expert_only=true, freeze_vision_encoder=true of the base's config.json are overruled by --train.mode="
    assert f"{line}full" in notes_of(full)
    assert not any("--train.mode" in note for note in notes_of(resolved(frozen, **{"train.mode": "expert"})))
    adapters = notes_of(resolved(frozen, **{"peft.r": 4}))  # in the expert alone
    assert not any("train_expert_only" in note for note in adapters)
    backbone = notes_of(resolved(frozen, **{"peft.target_modules": r".*language_model.*\.q_proj"}))
    assert "train_expert_only=true of the base's config.json is overruled by --peft.method_type=lora" in backbone


def test_plan_notes_every_overruled_option_of_base(changed):
    decided = {
        "compile_model": (True, {}, "=true .* overruled by --train.compile=false"),
        "use_amp": (True, {"train.precision": "fp32"}, "=true .* overruled by --train.precision=fp32"),
        "device": ("mps", {}, "=mps .* overruled by --scaling.use_gpu=false"),
        "repo_id": ("a/b", {"policy.repo_id": "c/d"}, "=a/b .* overruled by --policy.repo_id=c/d"),
        "use_peft": (True, {}, "=true .* overruled by --peft.method_type, which is absent"),
        "optimizer_lr": (3e-5, {"lr": "1e-4"}, "=3e-05 .* overruled by --lr=0.0001"),
        "optimizer_weight_decay": (0.5, {"optimizer.weight_decay": 0}, "=0.5 .* --optimizer.weight_decay=0"),
        "scheduler_decay_steps": (7, {"warmup_frac": 0.1}, "=7.* overruled by --warmup_frac"),
        "dtype": ("bfloat16", {"policy.dtype": "float32"}, "=bfloat16 .* overruled by --policy.dtype=float32"),
    }
    base = changed(**{name: saved for name, (saved, _, _) in decided.items()})
    notes = notes_of(
        resolved(base, **{flag: value for _, flags, _ in decided.values() for flag, value in flags.items()})
    )
    for name, (_, _, line) in decided.items():
        assert any(re.search(f"{name}{line}", note) for note in notes), (name, notes)
    assert resolved(changed(), **{"policy.use_amp": "false"}).config.train.precision == "auto"  # its `dtype` decides
    notes = notes_of(resolved(changed(repo_id="a/b")))
    assert notes == ["repo_id=a/b of the base's config.json is overruled by --policy.repo_id, which is absent"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"policy.pretrained_path": "elsewhere"}, "--policy.pretrained_path has no effect .* use --policy.path"),
        ({"policy.optimizer_lr": "1e-3", "lr": "1e-4"}, "optimizer_lr=0.001 has no effect with --lr=0.0001: give one"),
        ({"policy.scheduler_decay_lr": "1e-3", "warmup_frac": 0.1}, "decay_lr=0.001 has no effect with --warmup_frac"),
        (
            {
                "policy.optimizer_eps": "1e-3",
                "use_policy_training_preset": "false",
                "optimizer.type": "adam",
                "warmup_frac": 0,
            },
            "eps=0.001 has no effect with --use_policy_training_preset=false",
        ),
        ({"policy.use_peft": "true"}, "--policy.use_peft=true has no effect with --peft.method_type, which is absent"),
    ],
)
def test_conflicting_options_are_refused(setting, flags, message):
    with pytest.raises(ValueError, match=message):
        resolved(setting, **flags)


def test_smolvla_freeze_options_by_train_mode(tmp_path):
    root = make_dataset(tmp_path / "dataset", episodes=(12, 9, 10), cameras={"observation.images.top": (48, 64)})
    run, saved = resolved_from_nothing(root, "smolvla", tmp_path), tmp_path / "saved"
    config = run.policy.config
    config.freeze_vision_encoder = config.train_expert_only = config.train_state_proj = True
    save_pretrained(run.policy.start(), *run.policy.processors(), saved, config)

    def notes(**flags):
        return [
            note
            for note in notes_of(resolved_from(saved, root, "smolvla", **{"train.mode": "full", **flags}))
            if "train.mode" in note
        ]

    # In full mode vision stays frozen, as the base says; the language model trains.
    assert notes() == ["train_expert_only=true of the base's config.json is overruled by --train.mode=full"]
    assert notes(**{"train.mode": "expert"}) == notes(**{"train.mode": "heads"}) == []
    assert notes(**{"train.mode": "expert", "policy.train_state_proj": "false"}) == []  # obeyed
    with pytest.raises(ValueError, match="freeze_vision_encoder=false has no effect with --train.mode=expert"):
        notes(**{"train.mode": "expert", "policy.freeze_vision_encoder": "false"})
    trained = resolved_from(saved, root, "smolvla", **{"train.mode": "full", "policy.freeze_vision_encoder": "false"})
    assert trained.config.train.precision == "auto"
    in_float32 = resolved_from(saved, root, "smolvla", **{"train.mode": "full", "policy.use_amp": "false"})
    assert in_float32.config.train.precision == "fp32"
    assert "vision" in trained.policy.parameters.parts
