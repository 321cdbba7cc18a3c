"""Environment options: what is refused, and which environments result."""

import importlib.util
import json
import pickle
import re
from pathlib import Path

import pytest
from lerobot.utils.constants import ACTION

from tests.evaluation import several
from vla_finetuning.envs.configs import check_drawn, drawn_for, env_config, how_drawn, longest_episode, task_makers
from vla_finetuning.options.command_line import parse_evaluate, parse_record
from vla_finetuning.rollouts.experts import DEFAULTS, resolve_recording


def test_metaworld_config_follows_flags(monkeypatch):
    config = env_config("metaworld", ["--task=hard,metaworld-reach-v3,push-v3", "--image_size=[96,128]"])
    assert config.features["pixels"].shape == (96, 128, 3) and set(config.features) == {"pixels", "agent_pos", ACTION}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    makers = task_makers(config)
    assert len(makers) == 7 and list(makers)[-1] == "reach-v3"  # push is hard already
    assert pickle.loads(*makers["push-v3"].args).keywords["instruction"] == "Push the puck to a goal"
    assert len(task_makers(env_config("metaworld", ["--task=easy,medium,hard,very_hard"]))) == 50
    with pytest.raises(ValueError, match="Meta-World has no shove-v3; expected some of easy, "):
        task_makers(env_config("metaworld", ["--task=reach-v3,shove-v3"]))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs metaworld and mujoco .*: make metaworld"):
        task_makers(config)
    for option, message in {
        "--image_size=[96]": "Expected 2 items",
        "--image_size=[2,2]": "of at least 8",
        "--render_quality=ugly": "one of full, fast",
        "--episode_length=501": "at most 500 steps",
    }.items():
        with pytest.raises(ValueError, match=message):
            env_config("metaworld", [option])


def test_longest_episode_is_step_limit_of_environment():
    assert longest_episode(env_config("two_bins", ["--episode_length=30"])) == 30
    assert longest_episode(env_config("pusht")) == 300
    # As in LeRobot's LIBERO, the environments name it and not their configuration.
    assert longest_episode(several.SeveralConfig(episode_length=None)) == several.UNLIMITED


def test_render_options_that_differ_from_training_are_refused(tmp_path):
    recorded = env_config("metaworld", ["--image_size=[96,128]", "--render_quality=fast"])
    check_drawn(drawn_for(tmp_path), recorded, tmp_path)  # nothing is known of what it saw
    (tmp_path / "environment.json").write_text(json.dumps({"drawn": how_drawn(recorded)}))
    check_drawn(drawn_for(tmp_path), recorded, tmp_path)
    check_drawn(drawn_for(tmp_path), env_config("two_bins"), tmp_path)
    with pytest.raises(ValueError, match=r"give --env.image_size=\[96,128\] --env.render_quality=fast$"):
        check_drawn(drawn_for(tmp_path), env_config("metaworld"), tmp_path)
    with pytest.raises(ValueError, match=r"give --env.render_quality=fast$"):
        check_drawn(drawn_for(tmp_path), env_config("metaworld", ["--image_size=[96,128]"]), tmp_path)


def test_documented_commands_record_and_evaluate_with_equal_render_options():
    page = (Path(__file__).parents[2] / "docs" / "simulators.md").read_text().replace("\\\n", "")
    commands = [re.search(rf"python {name}.py (.* \[112,112\].*)", page)[1].split() for name in ("record", "evaluate")]
    recorded, played = parse_record(commands[0]).env_options, parse_evaluate(commands[1]).env_options
    drawn = [how_drawn(env_config("metaworld", options)) for options in ([*DEFAULTS["metaworld"], *recorded], played)]
    assert drawn[0] == drawn[1] and drawn[0]["image_size"] == [112, 112]


def test_invalid_recording_options_are_refused(tmp_path):
    (tmp_path / "mine").touch()
    for flags, message in (
        (["--env.type=pusht"], "--env.type=pusht has no scripted expert; those of metaworld, two_bins"),
        (["--env.type=nowhere"], "LeRobot knows no such environment"),
        (["--env.type=two_bins", "--env.length=3"], "--env.length: no option of TwoBinsConfig"),
        (["--env.type=metaworld", "--env.obs_type=pixels"], "obs_type=pixels: only pixels_agent_pos can be recorded"),
        (["--env.type=metaworld", "--env.task=reach-v3"], "exists and is not empty"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve_recording(parse_record([*flags, f"--root={tmp_path}"]))
    with pytest.raises(ValueError, match="give --env.type and --root"):
        parse_record(["--env.type=metaworld"])
