"""Options of the policy that options of the run decide."""

import pytest

from tests import in_process
from tests.datasets import make_dataset
from tests.in_process import resolved
from tests.training.test_as_lerobot import resolved as resolved_from_nothing
from tests.training.test_as_lerobot import resolved_from
from vla_finetuning.policies.saving import save_pretrained


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return in_process.make_setting(tmp_path_factory.mktemp("options"))


def test_explicit_use_amp_false_decides_precision(setting):
    run = resolved(setting, **{"policy.use_amp": "false", "scaling.use_gpu": "true"})
    assert run.config.train.precision == "fp32" and not run.config.planned_in_bf16
    assert resolved(setting, **{"policy.use_amp": "true"}).config.train.precision == "auto"


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
    save_pretrained(run.policy.start(), *run.policy.processors(), saved, run.policy.config)

    def trained(mode, **options):
        options = {f"policy.{name}": value for name, value in options.items()}
        return resolved_from(saved, root, "smolvla", **{"train.mode": mode, **options}).policy.parameters

    # In full mode vision stays frozen, as the base says; the language model trains.
    assert "vision" not in trained("full").parts
    assert "vision" in trained("full", freeze_vision_encoder="false").parts
    assert trained("expert", train_state_proj="false").trainable < trained("expert").trainable
    with pytest.raises(ValueError, match="freeze_vision_encoder=false has no effect with --train.mode=expert"):
        trained("expert", freeze_vision_encoder="false")
    in_float32 = resolved_from(saved, root, "smolvla", **{"train.mode": "full", "policy.use_amp": "false"})
    assert in_float32.config.train.precision == "fp32"
