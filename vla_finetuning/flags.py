"""The command lines: flags to a validated `Config`, what `--help` prints, what a wrong flag may have meant.

Flags that `lerobot-train` and `lerobot-eval` have keep their names and meaning and are parsed by the same library
(draccus); what is Ray's is under `--scaling.*`, what is ours under `--train.*`. A preset is a set of flags that come
before the user's own. The options themselves are in config.py.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import draccus

from vla_finetuning.checks import validate, validate_evaluate, validate_grpo, validate_record
from vla_finetuning.config import (
    BEFORE_OPTIONS,
    CONFIG_NAME,
    GROUPS,
    GRPO_PRESETS,
    OF_A_START,
    PRESETS,
    Config,
    EvalOptions,
    EvaluateConfig,
    GrpoConfig,
    RecordConfig,
    refuse_credentials,
)
from vla_finetuning.lerobot_train import answer
from vla_finetuning.terminal import tell_text

# Options that are LeRobot's: `--policy.chunk_size 20` is kept as given, in such a list, and LeRobot parses it.
LEROBOTS = {group: f"{group}_options" for group in ("policy", "env", "optimizer", "scheduler")}
# Under --policy., but not the policy's own options. The first three lerobot-train counts to the policy; a base policy
# brings its own along, where it was once pushed to: not ours.
POLICY_FLAGS = {
    "policy.push_to_hub": "push_to_hub",
    "policy.repo_id": "policy_repo_id",
    "policy.private": "policy_private",
    "policy.trust_remote_code": "policy_trust_remote_code",
}
# Options of a run that `grpo.py` has no flags for: what is about data, and what is counted in steps.
NOT_IN_GRPO = ("dataset.", "run.", "steps", "num_epochs", "grad_accum", "warmup_frac", "final_lr_frac", "log_freq",
               "tolerance_s", "push_to_hub", "train.mask_padding", "train.noise_draws", "train.augmentation",
               "scaling.cpus_per_read_task", "scaling.find_unused_parameters", "config_path", "ema.", "eval_steps",
               "max_eval_samples", "export", "env_eval_freq", "keep_best_by", "use_policy_training_preset",
               "peft.", "sample_weighting.")  # fmt: skip


def parse_args(argv: Sequence[str]) -> Config:
    """Command line to a validated `Config`. Raises ValueError naming the flag, what was found and what to do."""
    config = _parse(argv, Config, PRESETS)
    validate(config)
    return config


def parse_grpo(argv: Sequence[str]) -> GrpoConfig:
    """Command line of `grpo.py` to a validated `GrpoConfig`. Raises ValueError naming the flag."""
    config = _parse(argv, GrpoConfig, GRPO_PRESETS)
    assert isinstance(config, GrpoConfig)
    validate_grpo(config)
    return config


def _parse(argv: Sequence[str], kind: type[Config], presets: Mapping[str, Mapping[str, str]]) -> Config:
    """Command line to a configuration of a kind, not yet validated."""
    for before, arg in zip(["", *argv], argv, strict=False):  # first of all: every other error may repeat them
        name = re.match(r"--[\w.]+(?==)", arg) or re.match(r"--[\w.]+$", before)
        refuse_credentials(arg, name[0] if name else "command line")
    named = ("policy.path", "policy.type", *POLICY_FLAGS, "env.type", "env.task")
    answered = answer if kind is Config else lambda _: None  # no flags of lerobot-train
    groups = tuple(f"{group}." for group in (LEROBOTS if kind is Config else ("policy", "env")))
    given = _normalise(argv, flag_names(kind), named, groups, answered)
    given = [(name, _resume(value, dict(given), presets) if name == "resume" else value) for name, value in given]
    names = dict(given)
    preset = names.get("preset")
    if preset is not None and preset not in presets:
        raise ValueError(f"--preset {preset}: expected one of {', '.join(presets)}")
    config_path = names.get("config_path")
    if names.get("resume") == "true":
        # What the run was started with stands; only flags given now change it.
        config_path, preset = str(_saved_config(names, presets)), None
    defaults = dict(presets.get(preset or "", {}))
    if names.get("resume") == "true":
        defaults |= _not_yet_options(Path(str(config_path)))
    # As in lerobot-train, where any option of adapters asks for LoRA.
    if "peft.method_type" not in names and any(name.startswith("peft.") for name in names):
        defaults["peft.method_type"] = "lora"
    if "sample_weighting.type" not in names and any(name.startswith("sample_weighting.") for name in names):
        defaults["sample_weighting.type"] = "rabc"
    # Two ways to say how long, of which the user's own replaces the other.
    for chosen, other in (("steps", "num_epochs"), ("num_epochs", "steps")):
        if chosen in names and other not in names:
            defaults[other] = "null"
    flags = [*defaults.items(), *given]
    flags = [pair for name, value in flags for pair in _workers(name, value)]
    flags = [(POLICY_FLAGS.get(name, name), value) for name, value in flags]
    theirs: dict[str, dict[str, str]] = {group: {} for group in LEROBOTS}
    rest = []
    for flag, value in flags:
        group, _, option = flag.partition(".")
        if group in theirs:
            theirs[group][option] = value
        elif flag != "config_path":
            rest.append(f"--{flag}={value}")
    try:
        if config_path:
            refuse_credentials(Path(config_path).read_text(), config_path)
        with draccus.config_type("json"):
            config = draccus.parse(kind, config_path=config_path, args=rest)
    except (draccus.utils.DraccusException, json.JSONDecodeError, OSError) as error:
        told = " ".join(str(error).split())
        hint = """; lists and maps are written as JSON: --dataset.camera_keys='["observation.images.top"]'"""
        raise ValueError(
            f"command line{f' or {config_path}' if config_path else ''}: {told}"
            + (hint if re.search(r"\b(list|dict)\[", told) else "")
        ) from error
    if config.dataset.image_size is None:  # how runs were saved before there was "auto"
        config.dataset.image_size = "stored"
    asked = {POLICY_FLAGS.get(name, name) for name in names}
    for option in OF_A_START:
        setattr(config, option, getattr(config, option) and option in asked)
    policy, env = theirs["policy"], theirs["env"]
    config.policy_path = policy.pop("path", config.policy_path)
    config.policy_type = policy.pop("type", config.policy_type)
    config.policy_revision = policy.pop("pretrained_revision", config.policy_revision)
    config.env_type = env.pop("type", config.env_type)
    for group, options in LEROBOTS.items():
        # Of a run that is resumed, those it has; what is given again stands in for what it was.
        merged = {option.partition("=")[0]: option for option in getattr(config, options)}
        merged |= {f"--{k}": f"--{k}={v}" for k, v in theirs[group].items()}
        setattr(config, options, list(merged.values()))
    return config


def parse_evaluate(argv: Sequence[str]) -> EvaluateConfig:
    """Command line of `evaluate.py` to a validated `EvaluateConfig`. Raises ValueError naming the flag."""
    names = {"policy.path": "policy_path", "policy.pretrained_revision": "policy_revision", "env.type": "env_type"}
    names["policy.trust_remote_code"] = "policy_trust_remote_code"
    flags = {f"eval.{option.name}": "bool" in str(option.type) for option in fields(EvalOptions)}
    flags |= {"seed": False, "output_dir": False, "use_gpu": True, "rename_map": False}
    own: dict[str, list[str]] = {"policy": [], "env": []}
    args = []
    for name, value in _normalise(argv, flags, tuple(names), ("policy.", "env."), lambda _: None):
        refuse_credentials(value, f"--{name}")
        group, _, option = name.partition(".")
        if name in flags or name in names:
            args.append(f"--{names.get(name, name)}={value}")
        else:
            own[group].append(f"--{option}={value}")
    try:
        with draccus.config_type("json"):
            config = draccus.parse(EvaluateConfig, args=args)
    except draccus.utils.DraccusException as error:
        raise ValueError(f"command line: {' '.join(str(error).split())}") from error
    config.policy_options, config.env_options = own["policy"], own["env"]
    validate_evaluate(config)
    return config


def parse_record(argv: Sequence[str]) -> RecordConfig:
    """Command line of `envs/record.py` to a validated `RecordConfig`. Raises ValueError naming the flag."""
    flags = {"env.type": False, "episodes": False, "seed": False, "root": False}
    args, options = [], []
    for name, value in _normalise(argv, flags, (), ("env.",), lambda _: None):
        refuse_credentials(value, f"--{name}")
        if name in flags:
            args.append(f"--{name.replace('.', '_')}={value}")
        else:
            options.append(f"--{name.removeprefix('env.')}={value}")
    try:
        with draccus.config_type("json"):
            config = draccus.parse(RecordConfig, args=args)
    except draccus.utils.DraccusException as error:
        raise ValueError(f"command line: {' '.join(str(error).split())}") from error
    config.env_options = options
    validate_record(config)
    return config


def help_text() -> str:
    """What `--help` prints: draccus' account of the options, under the names that the command line has for them."""
    with contextlib.redirect_stdout(io.StringIO()) as told, contextlib.suppress(SystemExit):
        draccus.parse(Config, args=["--help"])
    text = re.sub(r"\Ausage:.*?\n\n", "usage: vla.py [--FLAG VALUE ...]\n\n", told.getvalue(), flags=re.DOTALL)
    # Groups of options, of which draccus would take a file too.
    text = re.sub(r"^ *--[\w.]+ str\s+Config file for \w+ \(default: None\)\n", "", text, flags=re.MULTILINE)
    names = {f"{name} list[str]": f"{group}.OPTION VALUE" for group, name in LEROBOTS.items()}
    names |= {"policy_revision": "policy.pretrained_revision", "env_type": "env.type"}
    names |= {ours: theirs for theirs, ours in POLICY_FLAGS.items()}
    names |= {"policy_path": "policy.path", "policy_type": "policy.type"}
    for ours, theirs in names.items():
        text = text.replace(f"  --{ours} ", f"  --{theirs} ").replace(f"  --{ours}\n", f"  --{theirs}\n")
    return text


def print_help() -> int:
    tell_text(help_text())
    return 0


def _normalise(
    argv: Sequence[str],
    flags: Mapping[str, bool],
    named: Sequence[str],
    groups: tuple[str, ...],
    answered: Callable[[str], str | None] = answer,
) -> list[tuple[str, str]]:
    """`--a b`, `--a=b` and a bare `--a` (true, of options that are true or false) to pairs.

    Args:
        flags: those that there are, and whether they are true or false. named: some of `groups`, to suggest.
        groups: what a flag may begin with whose options are not ours.
        answered: what to say of a flag that is none here.
    """
    given: list[tuple[str, str | None]] = []
    for arg in argv:
        if arg.startswith("--"):
            name, equals, text = arg[2:].partition("=")
            given.append((name, text if equals else None))
        elif given and given[-1][1] is None:
            given[-1] = given[-1][0], arg
        else:
            raise ValueError(f"command line: {arg!r} belongs to no flag; flags look like --batch_size 8")
    pairs = []
    for name, value in given:
        if value is not None and not value.strip():
            raise ValueError(f"command line: --{name} is empty (an unset variable?): give a value, or leave it out")
        if name not in flags and (said := answered(name)):
            raise ValueError(f"command line: lerobot-train has --{name}; here: {said}")
        if name not in flags and not name.startswith(groups):
            raise ValueError(f"command line: unknown flag --{name}{_meant(name, [*flags, *named])}")
        if value is None and not flags.get(name, True):
            raise ValueError(f"command line: --{name} needs a value")
        pairs.append((name, "true" if value is None else _as_json(name, value)))
    return pairs


def _as_json(name: str, value: str) -> str:
    """What people write for some options, in the form that draccus reads: 1e4 for 10000, 0,1,5:8 for [0,1,5,6,7]."""
    kind = _kinds().get(name, "")
    if kind.startswith("int") and re.fullmatch(r"\d+(\.\d*)?e\+?\d+", value, re.IGNORECASE):
        return str(int(float(value))) if float(value).is_integer() else value
    as_list = kind.startswith("list[") and not kind.startswith("list[str] | str")  # of which a word is one, too
    if as_list and value.strip()[:1] not in ("[", "@") and value not in ("null", "auto", "stored"):
        parts = [part.strip() for part in value.split(",")]
        if kind.startswith("list[str"):
            return json.dumps(parts)
        numbers: list[int] = []
        for part in parts:
            first, colon, last = part.partition(":")
            if not (first.isdigit() and (last.isdigit() if colon else True)):
                return value
            numbers += range(int(first), int(last)) if colon else [int(first)]
        return json.dumps(numbers)
    return value


def _meant(name: str, known: Sequence[str]) -> str:
    """Which flag a wrong one may stand for: the same in another group, or one that is spelt alike."""
    last = {flag: flag.rpartition(".")[2] for flag in known}
    close = [flag for flag in known if last[flag] == name.rpartition(".")[2]]

    def likeness(flag: str) -> tuple[float, int]:  # of two that are as like, the one in no group
        return max(difflib.SequenceMatcher(None, spelt, name).ratio() for spelt in (flag, last[flag])), -flag.count(".")

    close = close or [flag for flag in [max(known, key=likeness)] if likeness(flag)[0] >= 0.75]
    return f"; did you mean --{close[0]}?" if close else "; --help lists them"


def _workers(name: str, value: str) -> list[tuple[str, str]]:
    """`--scaling.num_workers 2,8` to the two options that it is."""
    if name != "scaling.num_workers":
        return [(name, value)]
    least, comma, most = value.rpartition(",")
    return [("scaling.num_workers", most), ("scaling.min_workers", least if comma else "null")]


def flag_names(kind: type[Config] = Config) -> dict[str, bool]:
    """All flags but the policy's own and the environment's, and whether they are true or false."""
    left_out = NOT_IN_GRPO if kind is GrpoConfig else ()
    return {name: "bool" in of for name, of in _kinds(kind).items() if not name.startswith(left_out)}


def _kinds(kind: type[Config] = GrpoConfig) -> dict[str, str]:
    """The types of all flags but those of others' own options, as written; by default of all programs."""
    kinds = {"config_path": "str"}
    for option in fields(kind):
        if option.name in GROUPS:
            kinds |= _kinds_in(GROUPS[option.name], f"{option.name}.")
        elif not option.name.startswith("policy_") and option.name not in ("env_type", *LEROBOTS.values()):
            kinds[option.name] = str(option.type)
    return kinds


def _kinds_in(group: type, prefix: str) -> dict[str, str]:
    kinds: dict[str, str] = {}
    for option in fields(group):
        inner = get_type_hints(group)[option.name]
        is_group = is_dataclass(inner) and isinstance(inner, type)
        kinds |= _kinds_in(inner, f"{prefix}{option.name}.") if is_group else {prefix + option.name: str(option.type)}
    return kinds


def _resume(value: str, names: Mapping[str, str], presets: Mapping[str, Mapping[str, str]]) -> str:
    """--resume as "true" or "false": "auto" goes on with a run that is there."""
    if value.lower() not in ("true", "false", "auto"):
        raise ValueError(f"--resume {value}: expected true, false, or auto (to go on where there is a run, else start)")
    return str(_config_of_run(names, presets).is_file()).lower() if value.lower() == "auto" else value.lower()


def _saved_config(names: Mapping[str, str], presets: Mapping[str, Mapping[str, str]]) -> Path:
    """The configuration of the run to go on with."""
    path = _config_of_run(names, presets)
    if not path.is_file():
        raise FileNotFoundError(
            f"--resume: {path} does not exist, so {path.parent} holds no run; start one without --resume, or let "
            "--resume auto see"
        )
    return path


def _not_yet_options(path: Path) -> dict[str, str]:
    """What an earlier version, which wrote the configuration at `path`, did where there are options now."""
    try:
        saved = json.loads(path.read_text())
        there = {f"dataset.{name}" for name in saved["dataset"]}
        there |= {f"{group}.type" for group, name in LEROBOTS.items() if name in saved}
        return {name: value for name, value in BEFORE_OPTIONS.items() if name not in there}
    except (ValueError, KeyError, TypeError):
        return {}  # whoever parses it says what is wrong with it


def _config_of_run(names: Mapping[str, str], presets: Mapping[str, Mapping[str, str]]) -> Path:
    folder = names.get("output_dir") or presets.get(names.get("preset", ""), {}).get("output_dir")
    if folder is None:
        raise ValueError("--resume: say which run, --output_dir FOLDER")
    return Path(folder).expanduser() / CONFIG_NAME
