"""The tiny PI0.5, loaded, saved and run by LeRobot's own code."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_policy, make_pre_post_processors
from lerobot.policies.pi05 import modeling_pi05
from lerobot.policies.pi05.modeling_pi05 import PI05Policy
from lerobot.policies.pi_gemma import PiGemmaRMSNorm

from tests.tiny import make_config
from vla_finetuning.policies import tiny_pi05
from vla_finetuning.policies.tiny_pi05 import TinyPI05Policy, make_tiny_base, make_tokenizer

TASKS = ["Pick up the red cube.", "Open the drawer, slowly"]


def camera(height, width, dtype="video", channels=3):
    return {"dtype": dtype, "shape": (height, width, channels), "names": ["height", "width", "channels"]}


def vector(size, names=None):
    return {"dtype": "float32", "shape": (size,), "names": names}


def make_features(state=4, action=3):
    return {
        "observation.images.top": camera(40, 60),
        "observation.images.wrist": camera(32, 32),
        "observation.state": vector(state),
        "action": vector(action, [f"joint_{i}.pos" for i in range(action)]),
        "timestamp": vector(1),
    }


def make_stats(features):
    stats = {}
    for key in ("observation.state", "action"):
        (size,) = features[key]["shape"]
        stats[key] = {"q01": -np.arange(1.0, size + 1), "q99": np.arange(1.0, size + 1), "mean": np.zeros(size)}
    return stats


def make_base(folder, *, features=None, **options):
    features = features or make_features()
    if "stats" not in options:
        options["stats"] = make_stats(features)
    return make_tiny_base(folder, **{"features": features, "tasks": TASKS, "fps": 10, "chunk_size": 5, **options})


def load(folder):
    config = PreTrainedConfig.from_pretrained(folder)
    policy = get_policy_class(config.type).from_pretrained(folder, config=config)
    return policy, *make_pre_post_processors(config, pretrained_path=str(folder))


def observation(features, rows=2, tasks=TASKS):
    generator = torch.Generator().manual_seed(1)
    batch = {"task": [tasks[i % len(tasks)] for i in range(rows)]}
    for key, feature in features.items():
        shape = tuple(feature["shape"])
        if feature["dtype"] in ("video", "image"):
            batch[key] = torch.rand((rows, 3, *shape[:2]), generator=generator)
        elif key == "observation.state":
            batch[key] = torch.randn((rows, *shape), generator=generator)
    return batch


def test_lerobot_makes_and_trains_tiny_pi05_from_metadata(tmp_path):
    features = make_features()
    folder = make_base(tmp_path / "base")
    config = PreTrainedConfig.from_pretrained(folder)
    config.pretrained_path = folder
    metadata = SimpleNamespace(features=features, stats=make_stats(features))
    policy = make_policy(config, ds_meta=metadata)
    assert isinstance(policy, TinyPI05Policy) and isinstance(policy, PI05Policy)
    saved, _ = make_pre_post_processors(config, pretrained_path=str(folder))
    fresh, _ = make_pre_post_processors(config, dataset_stats=metadata.stats)
    batch = {**observation(features), "action": torch.randn(2, 5, 3)}
    from_folder, from_config = saved(dict(batch)), fresh(dict(batch))
    for key in ("observation.state", "action", "observation.language.tokens", "observation.language.attention_mask"):
        assert torch.equal(from_folder[key], from_config[key]), key
    loss, _ = policy.forward(from_folder)
    loss.backward()
    assert torch.isfinite(loss)


def test_tiny_pi05_restores_patched_lerobot_module():
    names = ("get_gemma_config", "PaliGemmaForConditionalGenerationWithPiGemma", "PiGemmaForCausalLM")
    before = [getattr(modeling_pi05, name) for name in names]
    TinyPI05Policy(make_config())
    assert [getattr(modeling_pi05, name) for name in names] == before
    config = make_config()
    config.image_resolution = (28, 56)  # refused by LeRobot, in the middle of its constructor
    with pytest.raises(ValueError, match="square"):
        TinyPI05Policy(config)
    assert [getattr(modeling_pi05, name) for name in names] == before
    assert modeling_pi05.get_gemma_config("gemma_2b").width == 2048


def test_fresh_policy_has_open_gates_and_scaled_weights():
    joint = TinyPI05Policy(make_config(width=64)).model.paligemma_with_expert
    norms = [m for m in joint.gemma_expert.model.modules() if isinstance(m, PiGemmaRMSNorm)]
    assert len(norms) == 3 * 2 + 1
    for norm in norms:
        scale, shift, gate = norm.dense(torch.randn(1, 64)).chunk(3, dim=-1)
        assert (gate == 1).all() and (scale == 0).all() and (shift == 0).all()
    for layer in (joint.paligemma.model.language_model.layers[0], joint.gemma_expert.model.layers[0]):
        assert layer.mlp.up_proj.weight.std().item() == pytest.approx(64**-0.5, rel=0.1)


def test_tiny_base_is_deterministic(tmp_path):
    state = torch.random.get_rng_state()
    bases = [make_base(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    assert torch.equal(torch.random.get_rng_state(), state)
    files = [{path.name: path.read_bytes() for path in base.iterdir()} for base in bases]
    assert files[0] == files[1]
    assert [name for name in files[0] if files[0][name] != files[2][name]] == ["model.safetensors"]
    for name, content in files[0].items():
        assert str(tmp_path).encode() not in content, f"{name} holds an absolute path"


def test_tiny_base_of_unusual_dataset_runs(tmp_path):
    features = {
        "observation.images.left": {"dtype": "image", "shape": [3, 24, 30], "names": ["channels", "height", "width"]},
        "observation.images.depth": camera(24, 30, channels=1),
        "observation.images.right": camera(50, 20),
        "observation.state": vector(32, {"motors": [f"m{i}" for i in range(32)]}),
        "observation.force": vector(3),
        "action": vector(32, {"arm": ["a"] * 16, "hand": ["b"] * 16}),
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
    }
    objects = {key: SimpleNamespace(**feature) for key, feature in features.items()}
    tasks = ["put the Größere block — die rote — into bin_3, then go back 250 mm"]
    folder = make_tiny_base(tmp_path / "base", features=objects, tasks=tasks, stats=make_stats(features), fps=30)
    policy, preprocessor, postprocessor = load(folder)
    assert list(policy.config.image_features) == ["observation.images.left", "observation.images.right"]
    assert policy.config.image_features["observation.images.left"].shape == (3, 24, 30)
    assert policy.config.image_features["observation.images.right"].shape == (3, 50, 20)
    assert policy.config.chunk_size == 30 and policy.config.action_feature_names == ["a"] * 16 + ["b"] * 16
    shapes = {"observation.images.left": (24, 30, 3), "observation.images.right": (50, 20, 3)}
    batch = observation({"observation.state": vector(32)}, tasks=tasks)
    for key, (height, width, _) in shapes.items():
        batch[key] = torch.rand(2, 3, height, width)
    prepared = preprocessor(batch)
    assert not (prepared["observation.language.tokens"] == make_tokenizer([]).unk_token_id).any()
    assert postprocessor(policy.predict_action_chunk(prepared)).shape == (2, 30, 32)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"observation.images.top": None, "observation.images.wrist": camera(9, 9, channels=1)}, "no RGB camera"),
        ({"observation.state": None}, "no 'observation.state'"),
        ({"action": None}, "no 'action'"),
        ({"observation.state": {"dtype": "float32", "shape": (2, 2), "names": None}}, "must be a vector"),
        ({"observation.images.top": {"dtype": "video", "shape": (3,), "names": None}}, "observation.images.top"),
    ],
)
def test_tiny_base_of_unsupported_dataset_is_refused(tmp_path, change, complaint):
    features = {key: feature for key, feature in {**make_features(), **change}.items() if feature is not None}
    with pytest.raises(ValueError, match=complaint):
        make_base(tmp_path / "base", features=features, stats=make_stats(make_features()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("fps", "expected"), [(200, 50), (1, 2)])
def test_default_chunk_size_is_bounded(tmp_path, fps, expected):
    folder = make_base(tmp_path / "base", fps=fps, chunk_size=None)
    assert PreTrainedConfig.from_pretrained(folder).chunk_size == expected


def test_large_vocabulary_is_cut_to_frequent_words(monkeypatch):
    monkeypatch.setattr(tiny_pi05, "MAX_VOCABULARY", 2)
    assert tiny_pi05._vocabulary([["go", "b"], ["go", "a"], ["go", "c", "c", "task", "255"]]) == ["go", "c"]


def test_tiny_base_refuses_invalid_arguments(tmp_path):
    wide = make_features(state=33)
    with pytest.raises(ValueError, match="'observation.state' has 33 dimensions, more than PI0.5's 32"):
        make_base(tmp_path / "base", features=wide)
    stats = make_stats(make_features())
    del stats["action"]["q99"]
    with pytest.raises(ValueError, match=r"'action' lack \['q99'\].*augment_dataset_quantile_stats"):
        make_base(tmp_path / "base", stats=stats)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "base").mkdir()
    with pytest.raises(FileExistsError, match="base"):
        make_base(tmp_path / "base")


# --- tokenizer -------------------------------------------------------------------------------------------------------


def test_tokenizer_separates_words_and_marks_unknown_ones():
    tokenizer = make_tokenizer(["red", "größer"])
    ids = tokenizer("Task: RED blue 红色 Größer 300, State: -1 7;\nAction: ")["input_ids"]
    pieces = " ".join(tokenizer.convert_ids_to_tokens(ids))
    assert pieces == "task : red <unk> <unk> größer <unk> , state : -1 7 ; action :"
    bins = [tokenizer(str(value))["input_ids"] for value in range(-1, 256)]
    assert len({token for (token,) in bins} - {tokenizer.unk_token_id}) == 257


def test_prompt_beyond_tokenizer_max_length_is_refused(tmp_path):
    policy, preprocessor, _ = load(make_base(tmp_path / "base"))
    features = make_features()
    spare = "very " * tiny_pi05.SPARE_WORDS
    preprocessor(observation(features, tasks=[spare + TASKS[0]]))
    limit = policy.config.tokenizer_max_length
    with pytest.raises(ValueError, match=rf"tokenizer_max_length {limit}.*shorten the instruction"):
        preprocessor(observation(features, tasks=["very " * limit]))
