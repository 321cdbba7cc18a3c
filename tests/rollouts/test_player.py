"""Policies as players: actions against LeRobot's own calls, and policies that are refused."""

import copy

import numpy as np
import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.envs import make_env_pre_post_processors
from lerobot.envs.utils import preprocess_observation
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.utils.constants import OBS_LANGUAGE_TOKENS

from tests import tiny
from tests.datasets import make_dataset
from tests.tiny_backbones import KINDS
from tests.training.test_as_lerobot import resolved
from vla_finetuning.envs.configs import env_config
from vla_finetuning.envs.protocol import concatenate, select_rows
from vla_finetuning.envs.two_bins_scene import CAMERAS, INSTRUCTIONS, draw_scene, render
from vla_finetuning.options.recap import ADVANTAGE
from vla_finetuning.policies import tiny_pi05
from vla_finetuning.policies.families.pi05 import PI05Loss
from vla_finetuning.policies.family import Family
from vla_finetuning.policies.loading import load_policy
from vla_finetuning.policies.pipelines import load_processors, saved_shapes, tokenizer_step
from vla_finetuning.policies.text_targets import ends_of_text, with_text
from vla_finetuning.rollouts.episodes import generator, noise
from vla_finetuning.rollouts.player import Acting, Eyes, Player, PolicySource, check_advantage, check_fits

ENV = env_config("two_bins")
KEYS = [(7, "two_bins", episode, decision) for episode in range(3) for decision in range(2)]
FEATURES = {
    **{f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, *size)) for name, size in CAMERAS.items()},
    "observation.state": PolicyFeature(FeatureType.STATE, (3,)),
}
STATS = {key: {"mean": np.zeros(3), "std": np.full(3, 9.0), "q01": -np.ones(3), "q99": np.ones(3)}
         for key in ("observation.state", "action")}  # fmt: skip


def act_config(**options):
    """Configure a tiny ACT for the two bins."""
    return tiny.act_config(FEATURES, use_vae=False, **options)


def observed():
    scenes = [draw_scene(np.random.default_rng(seed)) for seed in range(len(KEYS))]
    positions = np.array([scene.start for scene in scenes], np.float32)
    images = [render(scene, position) for scene, position in zip(scenes, positions, strict=True)]
    return {"agent_pos": positions, "pixels": {name: np.stack([i[name] for i in images]) for name in CAMERAS}}


@pytest.fixture(scope="module")
def instructions():
    return [list(INSTRUCTIONS.values())[i % 2] for i in range(len(KEYS))]


def make_base(folder, tasks, inputs=FEATURES, names=("x", "y", "z"), stats=STATS, **options):
    features = {
        key: {"dtype": "video", "shape": (*f.shape[1:], 3), "names": ["height", "width", "channels"]}
        if f.type is FeatureType.VISUAL
        else {"dtype": "float32", "shape": f.shape, "names": None}
        for key, f in inputs.items()
    }
    features["action"] = {"dtype": "float32", "shape": (3,), "names": list(names)}
    return tiny_pi05.make_tiny_base(folder, features=features, tasks=tasks, stats=stats, fps=10, **options)


@pytest.fixture(scope="module")
def pi05(tmp_path_factory):
    folder = make_base(tmp_path_factory.mktemp("player") / "base", list(INSTRUCTIONS.values()))
    config = PreTrainedConfig.from_pretrained(folder)
    config.n_action_steps = 4
    return load_policy(folder, config), *load_processors(folder, config)


def test_chunk_matches_lerobot_for_equal_noise(pi05, instructions):
    policy, pre, post = pi05
    actual = Player(policy, pre, post, Acting(env=ENV))(observed(), instructions, KEYS)
    batch = pre({**preprocess_observation(observed()), "task": instructions})
    drawn = np.stack([noise(*key, (policy.config.chunk_size, policy.config.max_action_dim)) for key in KEYS])
    expected = post(policy.predict_action_chunk(batch, noise=torch.from_numpy(drawn)))[:, :4]
    np.testing.assert_array_equal(actual, expected.numpy())
    assert actual.shape == (len(KEYS), 4, 3) and actual.dtype == np.float32


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = make_base(tmp_path_factory.mktemp("source") / "base", list(INSTRUCTIONS.values()))
    return PolicySource(folder, PreTrainedConfig.from_pretrained(folder), env=ENV)


def test_equal_weights_are_shared_before_moving_to_device(source, monkeypatch):
    first, states = source.load(1), []
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_, **__: states.append(module.state_dict()) or module)
    source.load(1, first)
    before = states[-1]
    shared = first.equal_weights(before)
    assert before.keys() == shared.keys()
    assert all(shared[name].data_ptr() == before[name].data_ptr() for name in shared)
    assert first.equal_weights({name: tensor.bfloat16() for name, tensor in before.items()}) == {}


def test_tied_weights_stay_tied_beside_another_player(source, monkeypatch):
    def embedding_and_head(policy):
        language = policy.model.paligemma_with_expert.paligemma
        return language.model.language_model.embed_tokens, language.lm_head

    def tied(*arguments, **named):
        policy = load_policy(*arguments, **named)
        embedding, head = embedding_and_head(policy)
        head.weight = embedding.weight
        return policy

    monkeypatch.setattr("vla_finetuning.rollouts.player.load_policy", tied)
    first = source.load(1)
    with torch.no_grad():
        embedding_and_head(first._policy)[0].weight += 1
    embedding, head = embedding_and_head(source.load(1, first)._policy)
    assert head.weight is embedding.weight


def loaded(parts, steps, relative):
    """Copy a policy with processors; set its executed steps and whether its actions are relative."""
    policy, pre, post = copy.deepcopy(parts)
    policy.config.n_action_steps, policy.config.use_relative_actions = steps, relative
    absolute = next(step for step in post.steps if hasattr(step, "relative_step"))
    absolute.relative_step = next(step for step in pre.steps if hasattr(step, "get_cached_state"))
    absolute.enabled = absolute.relative_step.enabled = relative
    return policy, pre, post


def moved(observation, steps):
    """Return the observation `steps` later."""
    return {**observation, "agent_pos": observation["agent_pos"] + np.float32(0.3 * steps)}


def test_select_action_controller_matches_lerobot_loop(pi05, instructions):
    """Relative actions add the current state; the rows are at different steps of a chunk."""
    policy, pre, post = loaded(pi05, 4, relative=True)
    player = Player(policy, pre, post, Acting(env=ENV, controller="select_action"))
    seen, shape = observed(), (1, policy.config.chunk_size, policy.config.max_action_dim)
    actual = {0: [], 1: []}
    for decision in range(8):  # the second episode begins three steps later
        rows = [row for row, first in ((0, 0), (1, 3)) if decision >= first]
        steps = {row: decision - 3 * row for row in rows}
        shown = concatenate([moved(select_rows(seen, [row]), steps[row]) for row in rows])
        actions = player(shown, [instructions[row] for row in rows], [(7, "two_bins", row, steps[row]) for row in rows])
        assert actions.shape == (len(rows), 1, 3)
        for row, action in zip(rows, actions, strict=True):
            actual[row].append(action[0])
    for row, actions in actual.items():
        policy.reset()
        for step, action in enumerate(actions):
            chunk = step // policy.config.n_action_steps
            policy.model.sample_noise = lambda *_, key=(7, "two_bins", row, chunk): torch.from_numpy(
                noise(*key, shape[1:])[None]
            )
            batch = pre({**preprocess_observation(moved(select_rows(seen, [row]), step)), "task": [instructions[row]]})
            with torch.no_grad():
                expected = post(policy.select_action(batch))[0]
            np.testing.assert_allclose(action, expected.numpy(), rtol=1e-4, atol=1e-4)
    batched = Player(policy, pre, post, Acting(env=ENV))
    chunk = batched(select_rows(seen, [0]), instructions[:1], [(7, "two_bins", 0, 0)])[0]
    np.testing.assert_allclose(actual[0][:4] - chunk, np.arange(4)[:, None] * [[0.3] * 3], atol=1e-3)
    with pytest.raises(RuntimeError, match="a policy process died"):
        player(select_rows(seen, [2]), instructions[:1], [(7, "two_bins", 2, 1)])


def test_row_is_independent_of_its_batch_and_of_earlier_calls(pi05, instructions):
    player = Player(*pi05, Acting(env=ENV))
    seen = observed()
    batched = player(seen, instructions, KEYS)
    torch.manual_seed(5)
    alone = np.concatenate([player(select_rows(seen, [i]), [instructions[i]], [KEYS[i]]) for i in range(len(KEYS))])
    scale = np.abs(batched).max()
    np.testing.assert_allclose(alone, batched, atol=2e-6 * scale)  # rounding of batches
    order = [4, 0, 5, 2, 1, 3]
    # Batches of one size are equal bit by bit.
    same = player(select_rows(seen, order), [instructions[i] for i in order], [KEYS[i] for i in order])
    np.testing.assert_array_equal(same, batched[order])
    other = player(seen, instructions, [(8, *key[1:]) for key in KEYS])
    assert np.abs(other - batched).max() > 0.01 * scale  # the noise does matter


def act():
    return ACTPolicy(act_config(chunk_size=6, n_action_steps=3))


def test_mixed_precision_matches_lerobot_eval(instructions):
    policy = act()
    pre, post = make_pre_post_processors(policy.config, dataset_stats=STATS)
    player = Player(policy, pre, post, Acting(env=ENV))
    plain = player(observed(), instructions, KEYS)
    np.testing.assert_array_equal(plain, player(observed(), instructions, [(9, *key[1:]) for key in KEYS]))
    policy.config.use_amp = True
    actual = player(observed(), instructions, KEYS)
    batch = pre({**preprocess_observation(observed()), "task": instructions})
    with torch.no_grad(), torch.autocast("cpu"):
        expected = post(policy.predict_action_chunk(batch))[:, :3]
    np.testing.assert_array_equal(actual, expected.float().numpy())
    assert actual.shape == (len(KEYS), 3, 3) and not np.array_equal(actual, plain)


@pytest.mark.parametrize("kind", ["eo1", "xvla"])
def test_packed_image_rows_match_lerobot(kind, tmp_path, instructions):
    """Some policies pack patches or crops of all cameras and rows into one tensor."""
    cameras = {f"observation.images.{name}": CAMERAS[name] for name in ("front", "top")}
    root = make_dataset(tmp_path / "dataset", episodes=(5, 5), cameras=cameras, state_dim=3)
    seen, rows = observed(), range(4)
    with KINDS[kind].here():
        run = resolved(root, kind)
        policy, (pre, post) = run.policy.start().eval(), run.policy.processors()
        player, before = Player(policy, pre, post, Acting(env=ENV)), torch.get_rng_state()
        actual = player(select_rows(seen, list(rows)), instructions[:4], KEYS[:4])
        assert torch.equal(before, torch.get_rng_state())
        for row in rows:
            shown = preprocess_observation(select_rows(seen, [row]))
            batch = pre({**{key: shown[key] for key in policy.config.input_features}, "task": [instructions[row]]})
            torch.manual_seed(int(generator(*KEYS[row]).integers(2**63)))
            policy.reset()
            for step in range(policy.config.n_action_steps):
                expected = post(policy.select_action(batch)).numpy()
                np.testing.assert_allclose(actual[row, step], expected[0], rtol=1e-5, atol=1e-5)
    assert actual.shape == (4, 4, 3)
    np.testing.assert_array_equal(player(select_rows(seen, [2]), [instructions[2]], [KEYS[2]]), actual[2:3])


@pytest.mark.parametrize("kind", ["molmoact2", "pi0_fast"])
def test_late_chunk_continues_beyond_executed_actions(kind, tmp_path, instructions):
    """By LeRobot these policies predict no more than n_action_steps, PI0-FAST the whole chunk in so many."""
    cameras = {f"observation.images.{name}": CAMERAS[name] for name in ("front", "top")}
    root, seen = make_dataset(tmp_path / "dataset", episodes=(5, 5), cameras=cameras, state_dim=3), observed()
    with KINDS[kind].here():
        run, seen = resolved(root, kind), select_rows(seen, [0])
        policy, (pre, post) = run.policy.start().eval(), run.policy.processors()
        shown = preprocess_observation(seen)
        batch = pre({**{key: shown[key] for key in policy.config.input_features}, "task": instructions[:1]})
        if kind == "pi0_fast":  # random weights write no actions
            policy.detokenize_actions = lambda _, action_horizon, action_dim: torch.full(
                (1, action_horizon, action_dim), 1.0 / action_horizon
            )
        torch.manual_seed(int(generator(*KEYS[0]).integers(2**63)))
        expected = post(policy.predict_action_chunk(batch))[0].numpy()
        policy.config.n_action_steps = 2
        (acted,) = Player(policy, pre, post, Acting(env=ENV)).act(seen, instructions[:1], KEYS[:1], delay=1)
    np.testing.assert_array_equal(np.concatenate([acted.actions, acted.rest.actions]), expected[:3])


def in_libero(rows=2):
    """Make observations as LeRobot's LIBERO returns them."""
    rng = np.random.default_rng(0)
    turns = np.stack([np.linalg.qr(rng.normal(size=(3, 3)))[0] for _ in range(rows)])
    eef = {"pos": rng.normal(size=(rows, 3)), "quat": rng.normal(size=(rows, 4)), "mat": turns}
    robot = {"eef": eef, "gripper": {"qpos": rng.normal(size=(rows, 2))}}
    images = {name: rng.integers(0, 256, (rows, 48, 64, 3), dtype=np.uint8) for name in ("image", "image2")}
    return {"pixels": images, "robot_state": {k: {n: v.astype(np.float32) for n, v in part.items()}
                                              for k, part in robot.items()}}  # fmt: skip


@pytest.mark.parametrize("normalises", [False, True])
def test_xvla_in_libero_matches_lerobot(normalises, tmp_path):
    """Rotations have six numbers; LeRobot's chain expects a preprocessor that does not normalise images."""
    cameras = dict.fromkeys(("observation.images.image", "observation.images.image2"), (48, 64))
    root = make_dataset(tmp_path / "dataset", episodes=(5, 5), cameras=cameras, state_dim=20, action_dim=20)
    env, tasks, keys = env_config("libero"), ["go to the red bin"] * 2, KEYS[:2]
    run = resolved(
        root, "xvla", **{"policy.action_mode": "ee6d", "policy.max_state_dim": 20, "policy.max_action_dim": 20}
    )
    policy, (pre, post) = run.policy.start().eval(), run.policy.processors()
    check_fits(policy.config, env, {}, run.robots[0].match.shapes)
    plain = copy.copy(pre)
    done = ("xvla_image_to_float", "xvla_imagenet_normalize", "xvla_add_domain_id")
    plain.steps = [step for step in pre.steps if getattr(step, "_registry_name", None) not in done]
    player = Player(policy, pre if normalises else plain, post, Acting(env=env))
    actual = player(in_libero(), tasks, keys)
    before, after = make_env_pre_post_processors(env, policy.config)
    for row, key in enumerate(keys):
        shown = before({**preprocess_observation(select_rows(in_libero(), [row])), "task": tasks[:1]})
        torch.manual_seed(int(generator(*key).integers(2**63)))
        policy.reset()
        expected = [after({"action": post(policy.select_action(plain(shown)))})["action"] for _ in range(4)]
        np.testing.assert_allclose(actual[row], torch.cat(expected).numpy(), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="outside"):
        pre(shown)
    # In dataset format: rotated, not normalised.
    eyes = Eyes(env, policy.config)({"pixels": {k: v[0] for k, v in in_libero()["pixels"].items()}})
    np.testing.assert_array_equal(eyes["observation.images.image"], in_libero()["pixels"]["image"][0, ::-1, ::-1])


def check_refused(message, *arguments):
    with pytest.raises(ValueError, match=message):
        check_fits(*arguments)


def test_xvla_inputs_are_checked_against_environment():
    """As lerobot/xvla-base: a third camera and an arbitrary state length."""
    config = PreTrainedConfig.get_choice_class("xvla")(device="cpu")
    names = ("image", "image2", "image3", "empty_camera_0")
    config.input_features = {f"observation.images.{n}": PolicyFeature(FeatureType.VISUAL, (3, 64, 64)) for n in names}
    config.input_features["observation.state"] = PolicyFeature(FeatureType.STATE, (8,))
    libero = env_config("libero")
    for width in (7, 10, 20):
        config.output_features = {"action": PolicyFeature(FeatureType.ACTION, (width,))}
        check_fits(config, libero, {})
        trained = {"observation.state": (8 if width == 7 else 20,)}
        check_fits(config, libero, {}, trained)
        with pytest.raises(ValueError, match="another robot"):
            check_fits(config, libero, {}, {"observation.state": (28 - trained["observation.state"][0],)})
        with pytest.raises(ValueError, match=rf"'action' has the shape \({width},\).*\(3,\)"):
            check_fits(config, ENV, {"observation.images.top": "observation.images.image"})
    config.output_features = {"action": PolicyFeature(FeatureType.ACTION, (14,))}
    check_refused(r"'action' has the shape \(14,\).*\(7,\)", config, libero, {})


def test_policy_that_does_not_fit_environment_is_refused():
    config = act().config
    check_fits(config, ENV, {})
    renamed = {"observation.images.front": "observation.images.cam0"}
    config.input_features = {renamed.get(key, key): feature for key, feature in FEATURES.items()}
    check_refused(r"needs \['observation.images.cam0'\].*--rename_map=", config, ENV, {})
    check_fits(config, ENV, renamed)
    # The message proposes an environment name that the map does not use yet.
    config.input_features["observation.images.cam1"] = config.input_features.pop("observation.images.wrist")
    check_refused(r"shows \['observation.images.front', .*='\{.observation.images.wrist", config, ENV, renamed)
    config.input_features["observation.images.wrist"] = config.input_features.pop("observation.images.cam1")
    config.output_features = {"action": PolicyFeature(FeatureType.ACTION, (7,))}
    check_refused(r"'action' has the shape \(7,\).*another robot", config, ENV, renamed)
    # LIBERO's environment processor assembles the state.
    config = act().config
    images = ("image", "image2")
    config.input_features = {f"observation.images.{name}": FEATURES["observation.images.top"] for name in images}
    config.input_features["observation.state"] = PolicyFeature(FeatureType.STATE, (8,))
    config.output_features = {"action": PolicyFeature(FeatureType.ACTION, (7,))}
    check_fits(config, env_config("libero"), {})


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        # Its select_action differs from its chunk from the second step on.
        ("act", {"temporal_ensemble_coeff": 0.01, "n_action_steps": 1}, "temporal_ensemble_coeff=0.01 averages"),
        # Even with one step its state lacks the time axis and its queues stay empty.
        ("diffusion", {"n_obs_steps": 1}, "n_obs_steps=1 .* past"),
        ("vqbet", {"n_obs_steps": 2}, "n_obs_steps=2 .* past"),
        ("multi_task_dit", {"n_obs_steps": 1}, "n_obs_steps=1 .* past"),
    ],
)
def test_policy_with_observation_history_is_refused(kind, options, message):
    shapes = {"input_features": FEATURES, "output_features": act_config().output_features}
    config = PreTrainedConfig.get_choice_class(kind)(**shapes, device="cpu", **options)
    check_refused(f"a '{kind}' policy .*{message}.*lerobot-eval can", config, ENV, {})


def test_policy_without_action_prediction_is_refused(monkeypatch):
    monkeypatch.setattr(Family, "cannot_predict", lambda self, config: "give --policy.way")
    check_refused("'act' policy predicts nothing as it is configured: give --policy.way", act().config, ENV, {})


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """Make a policy as fine-tuned from lerobot/pi05_base with masked cameras: padded state, one camera absent."""
    inputs = {
        "observation.images.left_wrist_0_rgb": PolicyFeature(FeatureType.VISUAL, (3, 56, 56)),
        **{key: FEATURES[f"observation.images.{key.rpartition('.')[2]}"] for key in SEEN},
        "observation.state": PolicyFeature(FeatureType.STATE, (32,)),
    }
    return make_base(tmp_path_factory.mktemp("masked") / "base", list(INSTRUCTIONS.values()), inputs)


SEEN = ("observation.images.front", "observation.images.wrist")


def test_masked_cameras_of_training_are_masked(masked, instructions):
    config = PreTrainedConfig.from_pretrained(masked)
    trained = saved_shapes(masked, config)
    assert trained == {"observation.state": (3,), "action": (3,)}
    check_fits(config, ENV, {}, trained)
    actual = Player(load_policy(masked, config), *load_processors(masked, config), Acting(env=ENV))(
        observed(), instructions, KEYS
    )
    lerobot_policy = get_policy_class("tiny_pi05").from_pretrained(masked)
    drawn = np.stack([noise(*key, (config.chunk_size, config.max_action_dim)) for key in KEYS])
    lerobot_policy.model.sample_noise = lambda shape, device: torch.from_numpy(drawn)
    pre, post = make_pre_post_processors(config, pretrained_path=str(masked))
    seen = preprocess_observation(observed())
    batch = pre({**{key: seen[key] for key in (*SEEN, "observation.state")}, "task": instructions})
    images, masks = lerobot_policy._preprocess_images(batch)
    assert [bool(mask.all()) for mask in masks] == [True, True, False] and len(images) == 3
    for step in range(3):
        np.testing.assert_array_equal(actual[:, step], post(lerobot_policy.select_action(batch)).numpy())
    np.testing.assert_array_equal(actual, post(lerobot_policy.predict_action_chunk(batch)).numpy())


def test_pretrained_input_features_do_not_count_as_another_robot(masked):
    config = PreTrainedConfig.from_pretrained(masked)
    state, action = {"observation.state": (3,)}, {"action": (3,)}
    check_fits(config, ENV, {}, state)
    check_fits(config, ENV, {})  # a shorter state is padded, where no statistics are known
    for trained in ({"observation.state": (4,)}, {**state, "action": (4,)}):
        name = list(trained)[-1]
        check_refused(rf"'{name}' has the shape \(4,\).*another robot", config, ENV, {}, trained)
    config.max_state_dim = 40
    check_refused(r"has the shape \(32,\).*another robot", config, ENV, {})
    config.max_state_dim = 32
    config.input_features["observation.state"] = PolicyFeature(FeatureType.STATE, (2,))
    check_refused(r"has the shape \(2,\).*another robot", config, ENV, {})
    check_fits(config, ENV, {}, {**state, **action})
    # Cameras used in training are required, and at least one.
    with pytest.raises(ValueError, match=r"needs \['observation.images.left_wrist_0_rgb'\]"):
        check_fits(config, ENV, {}, {**state, "observation.images.left_wrist_0_rgb": (3, 1, 1)})
    hidden = {key: f"{key}.hidden" for key in FEATURES if "images" in key}
    check_refused("needs .*front.*left_wrist_0_rgb.*wrist", config, ENV, hidden, state)
    with pytest.raises(ValueError, match="needs .*wrist.*--rename_map="):
        check_fits(config, ENV, {"observation.images.wrist": "observation.images.left"}, state)
    # ACT has no camera masks and needs all.
    config = act().config
    with pytest.raises(ValueError, match=r"needs \['observation.images.top'\]"):
        check_fits(config, ENV, {"observation.images.top": "observation.images.hidden"})


# ---- advantages and guidance ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """Make a policy of random weights whose tokenizer knows the instructions and labels."""
    texts = [with_text(task, "bin red") for task in INSTRUCTIONS.values()]
    tasks = [f"{task}{words}" for task in (*INSTRUCTIONS.values(), *texts) for words in ("", *ADVANTAGE.values())]
    folder = make_base(tmp_path_factory.mktemp("labelled") / "base", tasks)
    config = PreTrainedConfig.from_pretrained(folder)
    config.n_action_steps = 4
    # LeRobot initialises some layers with zeros, which would ignore the prompt.
    return tiny.perturb(load_policy(folder, config), 0.05), *load_processors(folder, config)


def chunks(labelled, instructions, **options):
    return Player(*labelled, Acting(env=ENV, **options))(observed(), instructions, KEYS)


def test_advantage_label_is_appended_to_instruction(labelled, instructions):
    spoken = [f"{text}, Advantage: positive" for text in instructions]
    actual = chunks(labelled, instructions, advantage="positive")
    np.testing.assert_array_equal(actual, chunks(labelled, spoken))
    np.testing.assert_array_equal(actual, chunks(labelled, spoken, advantage="positive"))  # once
    assert not np.array_equal(actual, chunks(labelled, instructions, advantage="negative"))
    assert not np.array_equal(actual, chunks(labelled, instructions))


def test_guidance_extrapolates_between_unlabelled_and_labelled_chunks(labelled, instructions, monkeypatch):
    """Linear with one sampling step."""
    near = {"rtol": 1e-4, "atol": 1e-4}
    monkeypatch.setattr(labelled[0].config, "num_inference_steps", 1)
    with_label, without = (chunks(labelled, instructions, advantage=label) for label in ("positive", None))
    for guidance in (0.0, 1.0 + 1e-6, 2.5):
        actual = chunks(labelled, instructions, advantage="positive", guidance=guidance)
        np.testing.assert_allclose(actual, without + guidance * (with_label - without), **near)
    monkeypatch.undo()
    with_label = chunks(labelled, instructions, advantage="positive")
    almost = chunks(labelled, instructions, advantage="positive", guidance=1.0 + 1e-6)
    np.testing.assert_allclose(almost, with_label, **near)


@pytest.fixture
def writer(labelled, monkeypatch):
    """Return the policy, the texts that it generates, and its prompts."""
    policy, pre, post = labelled
    tokenizer = tokenizer_step(pre).input_tokenizer
    _, end = ends_of_text(tokenizer)
    texts = ["red", "bin red", ""] * 2

    def write(self, batch, begin, end, most):
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        prompts.append(tokenizer.batch_decode(batch[OBS_LANGUAGE_TOKENS], skip_special_tokens=True))
        return torch.tensor([row + [end] * (3 - len(row)) for row in ids])

    prompts = []
    monkeypatch.setattr(PI05Loss, "write", write)
    return labelled, texts, prompts


def test_policy_acts_on_its_generated_text(writer, instructions, monkeypatch):
    labelled, texts, prompts = writer
    actual = chunks(labelled, instructions, subtask=True)
    spoken = list(map(with_text, instructions, texts))
    near = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(actual, chunks(labelled, spoken), **near)
    assert not np.allclose(actual, chunks(labelled, instructions), **near)
    (alone,) = prompts
    assert not any("subtask" in prompt for prompt in alone)
    # The label stays last, as in training.
    both = {"advantage": "positive", "guidance": 1.5}
    expected = chunks(labelled, spoken, **both)
    embedded, embed = [], PI05Loss._embed_images
    monkeypatch.setattr(PI05Loss, "_embed_images", lambda self, images: embedded.append(images) or embed(self, images))
    np.testing.assert_allclose(chunks(labelled, instructions, subtask=True, **both), expected, **near)
    assert len(embedded) == 1  # for the text, the actions, and those without the label


@pytest.mark.parametrize("controller", ["select_action", "rtc"])
def test_generated_text_is_returned_per_row(writer, instructions, controller):
    labelled, texts, _ = writer
    keys = [(7, "two_bins", episode, 0) for episode in range(6)]
    player = Player(*labelled, Acting(env=ENV, subtask=True, controller=controller))
    acted = player.act(observed(), instructions, keys, int(controller == "rtc"))
    assert [result.text for result in acted] == texts
    player = Player(*labelled, Acting(env=ENV, controller=controller))
    assert all(result.text is None for result in player.act(observed(), instructions, keys, 1))


def test_guidance_requires_label_and_flow_policy(pi05):
    config = pi05[0].config
    check_advantage(config, None, 1.0)
    check_advantage(config, "positive", 2.0)
    with pytest.raises(ValueError, match="needs a label to strengthen: give --policy.advantage positive"):
        check_advantage(config, None, 2.0)
    with pytest.raises(ValueError, match="known for .*, and the policy is of type 'act'"):
        check_advantage(act_config(), "positive", 2.0)
