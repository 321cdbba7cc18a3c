"""Flags of lerobot-train, read from LeRobot's own options: each is accepted, or answered by name."""

import dataclasses
import typing
from pathlib import Path

import pytest
from lerobot.configs.train import TrainPipelineConfig

from vla_finetuning.options.command_line import PROGRAMS, VLA, parse_args
from vla_finetuning.options.lerobot_train import ANSWERED, answer, page


def options(kind, prefix=""):
    """The flags of an options class of LeRobot's, as draccus names them; `.*` for choices with options of their own."""
    hints = typing.get_type_hints(kind)
    for field in (field for field in dataclasses.fields(kind) if field.init):
        inner = [t for t in (hints[field.name], *typing.get_args(hints[field.name])) if dataclasses.is_dataclass(t)]
        if not inner:
            yield prefix + field.name
        elif hasattr(inner[0], "get_known_choices"):
            yield f"{prefix}{field.name}.*"
        else:
            yield from options(inner[0], f"{prefix}{field.name}.")


FLAGS = sorted(options(TrainPipelineConfig))


@pytest.mark.parametrize("flag", FLAGS)
def test_every_lerobot_train_flag_is_accepted_or_answered(flag):
    if answer(flag) is None:
        assert flag in VLA.flags
        return
    with pytest.raises(ValueError) as error:
        parse_args([f"--{flag.replace('*', 'type')}", "1", "--dataset.root=/d", "--policy.type=act", "--output_dir=/o"])
    assert f"LeRobot has --{flag.replace('*', 'type')}; here: {answer(flag)}" in str(error.value)


def test_answers_are_for_lerobot_train_flags_only():
    assert len(FLAGS) > 60
    for known in ANSWERED:
        assert known in FLAGS or any(flag.startswith(known.removesuffix("*")) for flag in FLAGS), known


def test_flags_named_in_answers_exist():
    named = {word.strip("(),;:") for text in ANSWERED.values() for word in text.split() if word.startswith("--")}
    assert len(named) > 8
    assert {name.removeprefix("--") for name in named} <= {name for program in PROGRAMS for name in program.flags}


def test_lerobot_train_page_is_up_to_date():
    assert (Path(__file__).parents[1] / "docs" / "lerobot_train.md").read_text() == page() + "\n"
