"""An installed `lerobot_policy_*` package with an unknown policy, against `lerobot-train`."""

import sys

import pytest
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors

from tests.datasets import make_dataset
from tests.tiny_backbones import KINDS, Kind
from tests.training.test_as_lerobot import lerobots, relative, resolved, resolved_from, trained
from vla_finetuning.plan.describe import describe
from vla_finetuning.policies.family import Family
from vla_finetuning.policies.registry import describe_unproven, family_of, find_type

SOURCES = {
    "__init__": "from . import configuration_xyz",
    "configuration_xyz": """
from dataclasses import dataclass, field

from lerobot.configs import NormalizationMode, PreTrainedConfig
from lerobot.optim import AdamWConfig
from lerobot.policies.act.configuration_act import ACTConfig


@PreTrainedConfig.register_subclass("xyz")
@dataclass
class XyzConfig(PreTrainedConfig):
    chunk_size: int = 4
    n_action_steps: int = 4
    width: int = 8
    normalization_mapping: dict[str, NormalizationMode] = field(
        default_factory=lambda: dict.fromkeys(("STATE", "ACTION", "VISUAL"), NormalizationMode.MEAN_STD)
    )
    observation_delta_indices = reward_delta_indices = None

    @property
    def action_delta_indices(self):
        return list(range(self.chunk_size))

    def get_optimizer_preset(self):
        return AdamWConfig(lr=1e-2)

    def get_scheduler_preset(self):
        return None

    def validate_features(self): ...


@PreTrainedConfig.register_subclass("xyz_act")
@dataclass
class XyzActConfig(ACTConfig): ...
""",
    "modeling_xyz": """
import torch
from lerobot.policies.pretrained import PreTrainedPolicy

from .configuration_xyz import XyzConfig


class XyzPolicy(PreTrainedPolicy):
    config_class, name = XyzConfig, "xyz"

    def __init__(self, config, **_):
        super().__init__(config)
        self.actions = (config.chunk_size, *config.output_features["action"].shape)
        inputs = config.input_features["observation.state"].shape[0] + 3 * len(config.image_features) + 1
        sizes = inputs, config.width, self.actions[0] * self.actions[1]
        self.layers = torch.nn.Sequential(torch.nn.Linear(*sizes[:2]), torch.nn.ReLU(), torch.nn.Linear(*sizes[1:]))

    def predict_action_chunk(self, batch, **_):
        words = torch.tensor([[float(len(task.split()))] for task in batch["task"]])
        pixels = [batch[camera].mean((-1, -2)) for camera in self.config.image_features]
        return self.layers(torch.cat([batch["observation.state"], *pixels, words], -1)).unflatten(-1, self.actions)

    def forward(self, batch):
        noise = 0.1 * torch.randn_like(batch["action"])
        errors = (self.predict_action_chunk(batch) - batch["action"] - noise).square()
        return (errors * ~batch["action_is_pad"][..., None]).mean(), {"largest": errors.max().item()}

    def get_optim_params(self):
        return self.parameters()

    def select_action(self, batch, **_):
        return self.predict_action_chunk(batch)[:, 0]

    def reset(self): ...
""",
    "processor_xyz": """
from lerobot.processor import make_default_pre_post_processors


def make_xyz_pre_post_processors(config, dataset_stats=None):
    return make_default_pre_post_processors(config, dataset_stats, normalizer_device=config.device)
""",
}


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """Install the package and make a dataset."""
    package, metadata = tmp_path / "lerobot_policy_xyz", tmp_path / "lerobot_policy_xyz-1.0.dist-info" / "METADATA"
    package.mkdir()
    for name, source in SOURCES.items():
        (package / f"{name}.py").write_text(source)
    metadata.parent.mkdir()
    metadata.write_text("Name: lerobot_policy_xyz\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(PreTrainedConfig, "_choice_registry", dict(PreTrainedConfig.get_known_choices()))
    monkeypatch.setitem(KINDS, "xyz", Kind({"width": 16}))
    yield make_dataset(tmp_path / "data", episodes=(12, 9), cameras={"observation.images.top": (48, 64)})
    for name in [name for name in sys.modules if name.partition(".")[0] == package.name]:
        del sys.modules[name]


def test_ten_steps_of_an_installed_policy_equal_lerobot_train(dataset):
    run = resolved(dataset, "xyz")
    assert "unproven here: it is trained by its own forward, which no test compares" in describe(run)
    weights = trained(run)
    expected = lerobots(run, dataset)[0].state_dict()
    start = run.policy.start().state_dict()
    assert weights.keys() == expected.keys() and max(relative(weights, start).values()) > 1e-3
    assert max(relative(weights, expected).values()) <= 1e-6


def test_run_starts_from_saved_weights_of_an_installed_policy(dataset, tmp_path):
    run = resolved(dataset, "xyz")
    policy = run.policy.start()
    for part in (policy, *make_pre_post_processors(policy.config, dataset_stats=run.policy.robots[0].stats)):
        part.save_pretrained(tmp_path / "saved")
    start = resolved_from(tmp_path / "saved", dataset, "xyz").policy.start().state_dict()
    assert all(torch.equal(start[name], value) for name, value in policy.state_dict().items())


def test_installed_policy_with_an_update_hook_is_refused(dataset, monkeypatch):
    find_type("xyz")
    monkeypatch.setattr(get_policy_class("xyz"), "update", lambda policy: None, raising=False)
    with pytest.raises(ValueError, match=r"lerobot-train calls its update\(\) after each step"):
        resolved(dataset, "xyz")


def test_policy_derived_from_a_known_type_is_trained_by_its_own_forward(dataset):
    find_type("xyz_act")
    derived = PreTrainedConfig.get_choice_class("xyz_act")()
    assert family_of(derived).type == "xyz_act" and type(family_of(derived)) is Family
    assert "unproven here: it is trained by its own forward" in describe_unproven(derived)
    assert "unproven" not in describe(resolved(dataset, "act"))
