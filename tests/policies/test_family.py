"""The registry of policy families: types trained, types refused, and a planted family."""

import re
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.vqbet.configuration_vqbet import VQBeTConfig
from torch import nn

from tests.datasets import make_dataset
from tests.tiny import make_config
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.options.fields import options_of
from vla_finetuning.options.programs import Config
from vla_finetuning.plan import base_policy
from vla_finetuning.plan.resolve import resolve
from vla_finetuning.policies.family import UNUSED, Family, PolicyLoss
from vla_finetuning.policies.registry import FAMILIES, family_of, types_that
from vla_finetuning.training.model import build_model


def test_family_of_derived_and_unregistered_types(monkeypatch):
    assert make_config().type == "tiny_pi05" and family_of(make_config()) is FAMILIES["pi05"]
    assert family_of(make_config()).tokenizer_name(make_config()) is None  # its processors are its own
    assert family_of(ACTConfig()) is FAMILIES["act"]
    monkeypatch.delitem(FAMILIES, "vqbet", raising=False)
    family = family_of(VQBeTConfig())
    assert type(family) is Family and family.type == "vqbet" and not family.as_lerobot


def test_every_lerobot_type_is_trained_or_refused_with_reason():
    known = PreTrainedConfig.get_known_choices()
    theirs = {name for name, kind in known.items() if kind.__module__.startswith("lerobot.")}
    assert {name for name, family in FAMILIES.items() if family.as_lerobot or family.refused} == theirs
    assert not [name for name, family in FAMILIES.items() if family.as_lerobot and family.refused]


def test_readme_table_lists_every_trained_type():
    section = (Path(__file__).parents[2] / "README.md").read_text().split("\n## Policies\n")[1].split("\n## ")[0]
    named = set(re.findall(r"^\| `(\w+)`[^|]*\|(?:[^|]+\|){5}$", section, re.MULTILINE))
    assert named == {name for name, family in FAMILIES.items() if family.as_lerobot}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("lingbot_va", "a 'lingbot_va' is not trained here: LeRobot computes its training attention in half precision"),
        ("groot", "its forward needs the package dm-tree"),
        ("tdmpc", "its target network follows the others after every step"),
        ("wall_x", "it needs the packages torchdiffeq and qwen-vl-utils"),
        ("perceptron", "no policy is of type 'perceptron'; LeRobot knows act, "),
    ],
)
def test_unsupported_policy_type_is_refused_with_reason(dataset, kind, reason, monkeypatch):
    monkeypatch.setattr(base_policy, "policy_config_of", None)
    argv = [f"--dataset.root={dataset}", f"--policy.type={kind}", f"--output_dir={dataset.parent / 'out'}"]
    with pytest.raises(ValueError, match=f"^--policy.type={kind}: .*{reason}"):
        resolve(parse_args(argv), gpus_found=0)


def test_packages_named_as_missing_are_not_locked():
    lock = (Path(__file__).parents[2] / "requirements.lock").read_text().lower()
    for kind, packages in (("groot", ("dm-tree",)), ("wall_x", ("torchdiffeq", "qwen-vl-utils"))):
        for package in packages:
            assert package in FAMILIES[kind].refused and not re.search(rf"^{package}\b", lock, re.MULTILINE)


@pytest.mark.parametrize("on_hub", [False, True])
def test_only_config_is_read_or_downloaded_of_refused_type(dataset, tmp_path, monkeypatch, on_hub):
    (tmp_path / "config.json").write_text('{"type": "lingbot_va"}')
    (tmp_path / "model.safetensors").touch()

    def snapshot_download(repo_id, *, allow_patterns, **_):
        assert allow_patterns == ["config.json"]
        return str(tmp_path)

    monkeypatch.setattr(base_policy, "policy_config_of", None)
    monkeypatch.setattr(huggingface_hub.HfApi, "resolve_revision", lambda *_, **__: SimpleNamespace(resolved="ab" * 20))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    path = "somebody/lingbot" if on_hub else tmp_path
    argv = [f"--dataset.root={dataset}", f"--policy.path={path}", f"--output_dir={dataset.parent / 'out'}"]
    with pytest.raises(ValueError, match=f"policy {path}: a 'lingbot_va' is not trained here: LeRobot"):
        resolve(parse_args(argv), gpus_found=0)


def test_fastwam_without_base_weights_is_refused_with_flag(dataset):
    argv = [f"--dataset.root={dataset}", "--policy.type=fastwam", f"--output_dir={dataset.parent / 'out'}"]
    with pytest.raises(ValueError, match="^--policy.type=fastwam: .* the weights of lerobot/fastwam_base: give them"):
        resolve(parse_args(argv), gpus_found=0)


class Doubled(PolicyLoss):
    def forward(self, batch, noise=None, time=None):
        return 2 * super().forward(batch)


class Planted(Family):
    modes = {"heads": {"head"}, "expert": {"head"}, "full": {"head", "rest"}}
    train_options = frozenset({"mask_padding"})
    ignored_options = {"use_vae": "--train.vae"}
    row_losses = True

    def parts(self, policy):
        kinds = {"action_head": "head", "vae_encoder": UNUSED}
        names = [name for name, _ in policy.named_parameters()]
        return {name: next((kind for key, kind in kinds.items() if key in name), "rest") for name in names}

    def make_loss(self, policy, *, mask_padding=False, images=None, **_):
        assert mask_padding
        return Doubled(policy, images=images)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("family") / "dataset", episodes=(12, 9))


def flags(root, *more):
    act = {"chunk_size": 4, "n_action_steps": 4, "dim_model": 16, "n_heads": 2, "dim_feedforward": 16}
    act |= {"n_encoder_layers": 1, "latent_dim": 4, "pretrained_backbone_weights": "null"}
    own = ["--policy.type=act", f"--dataset.root={root}", f"--output_dir={root.parent / 'out'}", "--batch_size=2"]
    return [*own, *(f"--policy.{name}={value}" for name, value in act.items()), "--scaling.use_gpu=false", *more]


OPTIONS = ("--train.mode=heads", "--train.mask_padding=true", "--dataset.on_error=skip", "--steps=2")


def test_registered_family_suffices_for_run(dataset, monkeypatch):
    for flag in (*OPTIONS[:3], "--train.attention=eager"):
        full = () if flag.startswith("--train.mode") else ("--train.mode=full",)
        with pytest.raises(ValueError, match=f"pi05.*act|act.*{flag.partition('=')[0]}") as caught:
            resolve(parse_args(flags(dataset, flag, "--steps=2", *full)), 0)
    assert "leave it out, or give sdpa, the default" in str(caught.value)
    monkeypatch.setitem(FAMILIES, "act", Planted("act", as_lerobot=True))
    run = resolve(parse_args(flags(dataset, *OPTIONS)), 0)
    loss, _ = build_model(run.policy, torch.device("cpu"))
    assert isinstance(loss, Doubled)
    trained = {name for name, parameter in loss.policy.named_parameters() if parameter.requires_grad}
    assert trained == {"model.action_head.weight", "model.action_head.bias"}
    assert not any("vae_encoder" in name for name, _ in loss.policy.named_parameters())  # removed as unused
    with pytest.raises(ValueError, match="use_vae has no effect on a 'act' here; use --train.vae"):
        resolve(parse_args(flags(dataset, *OPTIONS, "--policy.use_vae=true")), 0)
    assert {"pi05", "act", "pi0"} <= set(types_that(lambda family: family.row_losses).split(", "))


def test_precision_help_lists_types_trained_in_float32():
    (help_text,) = [option.help for option in options_of(Config) if option.path == "train.precision"]
    assert {name for name in FAMILIES if re.search(rf"\b{name}\b", help_text)} == {
        name for name, family in FAMILIES.items() if family.in_float32
    }


def test_fsdp2_units_exclude_modules_with_shared_parameters():
    """Tie a word embedding to its head: FSDP2 would shard them as two parameters."""
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False), "mlp": nn.Linear(3, 3)})
    assert PolicyLoss._training_modules(model, "embed|mlp") == [model["embed"], model["mlp"]]
    model["head"].weight = model["embed"].weight
    assert PolicyLoss._training_modules(model, "embed|mlp") == [model["mlp"]]
