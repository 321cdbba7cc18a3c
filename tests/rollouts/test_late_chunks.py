"""Late chunks against a simulated action queue and LeRobot's real-time engine."""

import copy
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lerobot.envs.utils import preprocess_observation
from lerobot.policies.rtc import RTCConfig
from lerobot.rollout.inference import rtc
from lerobot.utils.feature_utils import hw_to_dataset_features

from tests.rollouts.test_player import ENV, act_config, loaded, make_base, observed, pi05  # noqa: F401 (a fixture)
from vla_finetuning.envs.protocol import select_rows
from vla_finetuning.envs.two_bins_scene import CAMERAS, INSTRUCTIONS
from vla_finetuning.evaluation.trial import flags_of_rtc
from vla_finetuning.policies.families.pi05 import PI05Loss
from vla_finetuning.policies.flow import continue_chunk
from vla_finetuning.policies.loading import load_policy_config
from vla_finetuning.rollouts.episodes import noise
from vla_finetuning.rollouts.player import Acting, Player, check_delay, check_rtc, rtc_options

TASK, CHUNK, FPS = next(iter(INSTRUCTIONS.values())), 10, 10.0
MOTORS = [f"{number}.pos" for number in range(3)]


def key(decision):
    return (7, "two_bins", 0, decision)


def noise_of(policy, decision):
    return torch.from_numpy(noise(*key(decision), (CHUNK, policy.config.max_action_dim))[None])


class World:
    """A robot that moves halfway to each action, with constant images."""

    def __init__(self):
        first = select_rows(observed(), [0])
        self.position, self._pixels, self.executed = first["agent_pos"][0], first["pixels"], []

    def observe(self):
        return {"agent_pos": self.position[None], "pixels": self._pixels}

    def step(self, action):
        self.executed.append(np.asarray(action))
        self.position = self.position + np.float32(0.5) * (np.asarray(action, np.float32) - self.position)

    def robot_observation(self):
        """Return the observation of a LeRobot robot."""
        motors = dict(zip(MOTORS, self.position.tolist(), strict=True))
        return motors | {name: images[0] for name, images in self._pixels.items()}


def rollout(player, world, delay, decisions):
    """Execute actions of `act` in a world and return them."""
    left = None
    for decision in range(decisions):
        ((executed, left, _),) = player.act(world.observe(), [TASK], [key(decision)], delay, [left])
        for action in executed:
            world.step(action)
    return np.array(world.executed)


@pytest.mark.parametrize(("steps", "delay", "relative"), [(4, 0, True), (4, 4, False), (7, 3, True)])
def test_late_chunks_match_a_simulated_action_queue(pi05, relative, steps, delay):  # noqa: F811
    policy, pre, post = loaded(pi05, steps, relative)

    def chunk(decision):
        batch = pre({**preprocess_observation(robot.observe()), "task": [TASK]})
        return list(post(policy.predict_action_chunk(batch, noise=noise_of(policy, decision)))[0].numpy())

    robot, arrivals = World(), {}
    queue = deque(chunk(0))  # which the robot waits for
    for step in range(5 * steps):
        if step and step % steps == 0:
            arrivals[step + delay] = chunk(step // steps)
        if step in arrivals:
            queue = deque(arrivals[step][delay:])
        robot.step(queue.popleft())
    actual = rollout(Player(policy, pre, post, Acting(env=ENV)), World(), delay, 5)
    np.testing.assert_array_equal(actual, np.array(robot.executed))
    at_once = rollout(Player(policy, pre, post, Acting(env=ENV)), World(), 0, 5)
    assert np.array_equal(actual, at_once) == (delay == 0)


def engine_actions(policy, pre, post, delay, count, horizon, monkeypatch):
    """Run LeRobot's engine for `count` steps on a clock that only inference advances."""
    policy.config.rtc_config = config = RTCConfig(execution_horizon=horizon)
    policy.init_rtc_processor()
    world, clock, calls, predictions = World(), [0.0], [], []

    def tick():
        action = engine.get_action(None)
        if action is not None and len(world.executed) < count:
            world.step(action.numpy())
        engine.notify_observation(world.robot_observation())
        if len(world.executed) == count:
            engine._shutdown_event.set()

    predict = policy.predict_action_chunk

    def delayed_predict(batch, **options):
        calls.append(options)
        chunk = predict(batch, noise=noise_of(policy, len(predictions)), **options)
        predictions.append(chunk)
        clock[0] += max(0.0, delay - 0.5) / FPS
        for _ in range(delay):
            tick()
        return chunk

    def sleep(seconds):
        assert seconds == rtc._RTC_IDLE_SLEEP_S, "an inference failed"
        tick()

    monkeypatch.setattr(rtc, "time", SimpleNamespace(perf_counter=lambda: clock[0], sleep=sleep))
    monkeypatch.setattr(policy, "predict_action_chunk", delayed_predict)
    features = hw_to_dataset_features(
        dict.fromkeys(MOTORS, float) | {name: (*size, 3) for name, size in CAMERAS.items()}, "observation"
    )
    robot = SimpleNamespace(robot_type="gantry", action_features=dict.fromkeys(MOTORS, float))
    engine = rtc.RTCInferenceEngine(
        *(policy, pre, post, robot, config, features, TASK, FPS, "cpu"),
        rtc_queue_threshold=CHUNK - policy.config.n_action_steps,
    )
    engine._action_queue = rtc.ActionQueue(config)
    engine.notify_observation(world.robot_observation())
    engine.resume()
    engine._rtc_loop()
    assert not engine.failed
    return np.array(world.executed), calls


@pytest.mark.parametrize(
    ("steps", "delay", "relative", "horizon"),
    [(4, 0, False, None), (4, 2, False, 10), (5, 5, True, None)],
)
def test_real_time_chunks_match_lerobot_engine(pi05, relative, steps, delay, horizon, monkeypatch):  # noqa: F811
    """Guided towards the remaining actions, or over a horizon of 10 whose last targets are zeros."""
    count = 5 * steps - delay
    policy, pre, post = loaded(pi05, steps, relative)
    expected, calls = engine_actions(policy, pre, post, delay, count, horizon or CHUNK - steps, monkeypatch)
    assert [options["inference_delay"] for options in calls[:3]] == [0, delay, delay]
    assert [options["prev_chunk_left_over"].shape[-2] for options in calls[1:3]] == [horizon or CHUNK - steps] * 2
    policy, pre, post = loaded(pi05, steps, relative)
    policy.config.rtc_config = horizon and RTCConfig(execution_horizon=horizon)
    actual = rollout(Player(policy, pre, post, Acting(env=ENV, controller="rtc")), World(), delay, 5)
    np.testing.assert_array_equal(actual[:count], expected)
    chunks = rollout(Player(*loaded(pi05, steps, relative), Acting(env=ENV)), World(), delay, 5)
    assert np.abs(actual[steps:count] - chunks[steps:count]).max() > 1e-3  # the guidance does matter


@pytest.mark.parametrize(("relative", "delay"), [(False, 0), (True, 2)])
def test_policy_trained_with_delay_is_conditioned_on_executed_actions(pi05, relative, delay):  # noqa: F811
    steps = 4
    policy, pre, post = loaded(pi05, steps, relative)
    policy.config.rtc_training_max_delay = 3
    player = Player(*copy.deepcopy((policy, pre, post)), Acting(env=ENV, controller="rtc"))
    actual, robot, loss, left = rollout(player, World(), delay, 5), World(), PI05Loss(policy), None
    for decision in range(5):
        prefix = {} if left is None else {"action": left}
        batch = pre({**preprocess_observation(robot.observe()), "task": [TASK], **prefix})
        chunk = continue_chunk(loss, batch, noise_of(policy, decision), batch["action"] if prefix else None)
        actions = post(chunk)
        for action in [*([] if left is None else left[0]), *actions[0, delay:steps]]:
            robot.step(action.numpy())
        left = actions[:, steps : steps + delay]
    scale = np.abs(actual).max()
    np.testing.assert_allclose(actual, np.array(robot.executed), atol=1e-5 * scale)
    guided = rollout(Player(*loaded(pi05, steps, relative), Acting(env=ENV, controller="rtc")), World(), delay, 5)
    assert np.abs(actual - guided)[steps:].max() > 1e-3 * scale


def test_real_time_chunks_of_a_row_are_independent_of_its_batch(pi05):  # noqa: F811
    player = Player(*loaded(pi05, 4, True), Acting(env=ENV, controller="rtc"))
    observation, keys = observed(), [(7, "two_bins", row, 0) for row in range(6)]
    rests = [acted.rest for acted in player.act(observation, [TASK] * 6, keys, 2)]
    keys = [(*name[:3], 1) for name in keys]
    batched = [acted.actions for acted in player.act(observation, [TASK] * 6, keys, 2, rests)]
    for row in range(6):
        (alone,) = player.act(select_rows(observation, [row]), [TASK], [keys[row]], 2, [rests[row]])
        np.testing.assert_allclose(alone.actions, batched[row], atol=2e-6 * np.abs(np.array(batched)).max())


@pytest.mark.parametrize(
    ("steps", "delay", "controller", "message"),
    [
        (8, 3, "chunk", "it ends before the next one arrives; give --policy.n_action_steps from 3 to 7"),
        (2, 3, "chunk", "the next is due before it arrives; give --policy.n_action_steps from 3 to 7"),
        (5, 6, "chunk", "a chunk must have at least 12 actions; lower --eval.latency_s"),
        (10, 0, "rtc", "it ends before the next one arrives; give --policy.n_action_steps from 1 to 9"),
        (7, 3, "chunk", None),
        (9, 0, "rtc", None),
        (5, 5, "rtc", None),
        (5, 3, "rtc trained for 2", "trained for at most 2 .*max_delay=0, by"),
        (5, 2, "rtc trained for 2", None),
        (5, 3, "chunk trained for 2", None),
    ],
)
def test_latency_that_does_not_fit_chunk_or_training_is_refused(steps, delay, controller, message):
    config = act_config(chunk_size=CHUNK, n_action_steps=steps)
    controller, trained, maximum = controller.partition(" trained for ")
    if trained:
        config.rtc_training_max_delay = int(maximum)
    refused = f"--eval.latency_s={delay / FPS:g} is {delay} steps.*{message}"
    with pytest.raises(ValueError, match=refused) if message else nullcontext():
        check_delay(config, delay / FPS, delay, controller)


def test_unsupported_real_time_chunking_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"of type 'act' \(supports_rtc\); give --eval.controller=chunk"):
        check_rtc(act_config(), 1.0)
    config = load_policy_config(make_base(tmp_path / "base", [TASK]))
    check_rtc(config, 1.0)
    with pytest.raises(ValueError, match="--policy.guidance=2 with --eval.controller=rtc"):
        check_rtc(config, 2.0)
    config.rtc_config = RTCConfig(execution_horizon=11)
    with pytest.raises(ValueError, match="--policy.rtc_config.execution_horizon=11: more than a chunk has"):
        check_rtc(config, 1.0)


def test_lerobot_rollout_flags_match_evaluation(tmp_path):
    config = load_policy_config(make_base(tmp_path / "base", [TASK]))
    config.n_action_steps = config.chunk_size - 4
    assert flags_of_rtc(config) == "--inference.queue_threshold=4 --inference.rtc.execution_horizon=4"
    config.rtc_config = RTCConfig(enabled=False, max_guidance_weight=5.0)  # as another controller may have left it
    assert flags_of_rtc(config) == "--inference.queue_threshold=4 --inference.rtc.max_guidance_weight=5.0"
    assert rtc_options(config).enabled
