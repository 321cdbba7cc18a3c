"""Parse a command line into a checked configuration, print `--help`, and suggest the flag that was meant.

Flags of `lerobot-train` and `lerobot-eval` keep their names and meaning. Ray's settings are under `--scaling.*`, this
project's own under `--train.*`. A preset is a set of flags that precede the user's. The other files of this folder
declare the options.

    python -m vla_finetuning.options.command_line > docs/flags.md

The module imports no package, so a program checks its command line before slow imports.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_finetuning.buckets.mirror import address, as_file, as_path, pull
from vla_finetuning.files import read_foreign_json
from vla_finetuning.options.credentials import refuse_credentials
from vla_finetuning.options.fields import Option, check, did_you_mean, get_option, leaves, options_of, set_option
from vla_finetuning.options.job import CONFIG_NAME, PER_START
from vla_finetuning.options.lerobot_train import answer
from vla_finetuning.options.mixture import read_mixture
from vla_finetuning.options.programs import (
    GRPO_PRESETS,
    PRESETS,
    VALUE_PRESETS,
    Config,
    EvaluateConfig,
    GrpoConfig,
    RecordConfig,
    ServeConfig,
    ValueConfig,
)
from vla_finetuning.terminal import print_safe_text

COSINE = ["warmup_frac", "final_lr_frac"]
# Flags for one setting: each replaces the preset's or the saved values of the others.
REPLACES = {"steps": ["num_epochs"], "num_epochs": ["steps"], "optimizer.lr": ["lr"], "scheduler.*": COSINE}
# The same for a new run with the options of another one; a resumed run keeps its policy and data.
POLICY = ["policy.path", "policy.type", "policy.pretrained_revision"]
DATA = ["dataset.root", "dataset.repo_id", "dataset.mixture", "dataset.revision"]
DATA += ["dataset.episodes", "dataset.exclude_episodes"]
SOURCES = {"policy.path": POLICY, "policy.type": POLICY, "value.backbone": ["value.backbone_lr"]}
SOURCES |= dict.fromkeys(DATA[:3], DATA)
# As in lerobot-train, any option of adapters enables LoRA, and any option of row weights enables RA-BC.
IMPLIED = {"peft.method_type": "lora", "sample_weighting.type": "rabc", "ema.enable": "true"}
CONFIG_PATH = Option(
    name="config_path",
    path="config_path",
    annotation=str | None,
    default=None,
    help="A run's config.json, whose options, as they were given, come before the preset's and those given. --preset "
    "replaces that run's preset.",
    form="a file",
    section="The run and its folder",
)


@dataclass(frozen=True)
class Program[C]:
    """A program and its command line."""

    command: str
    summary: str
    config_type: type[C]
    first: tuple[str, ...]  # flags that `--help` lists first
    presets: Mapping[str, Mapping[str, str]]

    @property
    def flags(self) -> dict[str, Option]:
        """Return the flags by name; `policy.*` stands for every option of the policy's own class, and so on."""
        flags = {option.name: option for option in options_of(self.config_type) if option.name}
        return flags | ({"config_path": CONFIG_PATH} if self.config_type is Config else {})

    def parse(self, argv: Sequence[str]) -> C:
        """Parse a command line into a checked configuration. Raises ValueError naming flag, value and remedy."""
        config = _parse(argv, self)
        check(config)
        return config

    def help(self) -> str:
        lines = [f"usage: python {self.command} --FLAG VALUE ...", "", self.summary, "", "What most runs need"]
        flags = self.flags
        for name in self.first:
            lines += _help_lines(flags[name])
        if self.presets:
            lines += ["", "Presets: sets of flags that come before those given"]
        for name, preset in self.presets.items():
            lines += _wrapped(f"--preset {name}: {_settings(preset)}", "  ", "      ")
        rest = [flags[name] for name in flags if name not in self.first]
        for section in dict.fromkeys(option.section for option in rest):
            lines += ["", *_wrapped(section, "", "  ")]
            for option in rest:
                if option.section == section:
                    lines += _help_lines(option)
        return "\n".join(lines)


VLA = Program(
    command="vla.py",
    summary="Fine-tune a vision-language-action policy on LeRobot datasets.",
    config_type=Config,
    first=(
        *("preset", "dataset.root", "dataset.repo_id", "policy.path", "output_dir", "steps", "batch_size"),
        *("scaling.num_workers", "dataset.eval_split", "resume", "dry_run"),
    ),
    presets=PRESETS,
)
GRPO = Program(
    command="grpo.py",
    summary="Let a policy learn from success alone: GRPO for PI0.5 in an environment.",
    config_type=GrpoConfig,
    first=(
        *("preset", "policy.path", "env.type", "output_dir", "grpo.iterations", "grpo.groups", "grpo.group_size"),
        *("batch_size", "scaling.num_workers", "resume", "dry_run"),
    ),
    presets=GRPO_PRESETS,
)
EVALUATE = Program(
    command="evaluate.py",
    summary="Have a policy play episodes in an environment; --compare A B compares the folders of two evaluations.",
    config_type=EvaluateConfig,
    first=("policy.path", "env.type", "eval.n_episodes", "output_dir"),
    presets={},
)
RECORD = Program(
    command="record.py",
    summary="Record demonstrations in an environment, as a LeRobot v3 dataset.",
    config_type=RecordConfig,
    first=("env.type", "root", "episodes"),
    presets={},
)
SERVE = Program(
    command="serve.py",
    summary="Serve a policy to robots and benchmarks, by openpi's protocol and LeRobot's (docs/serving.md).",
    config_type=ServeConfig,
    first=("policy.path", "serve.host", "serve.port", "serve.grpc_port", "serve.replicas"),
    presets={},
)
VALUE = Program(
    command="value.py",
    summary="Learn what every frame of a dataset is worth, and label which actions were good (docs/recap.md).",
    config_type=ValueConfig,
    first=(
        *("preset", "policy.path", "dataset.root", "outcome.success", "output_dir", "steps", "batch_size"),
        *("scaling.num_workers", "dataset.eval_split", "resume", "dry_run"),
    ),
    presets=VALUE_PRESETS,
)
PROGRAMS: tuple[Program[Any], ...] = (VLA, GRPO, VALUE, EVALUATE, SERVE, RECORD)
parse_args, parse_grpo, parse_value = VLA.parse, GRPO.parse, VALUE.parse
parse_evaluate, parse_serve, parse_record = EVALUATE.parse, SERVE.parse, RECORD.parse


def asks_for_help(argv: Sequence[str]) -> bool:
    return not argv or bool({"-h", "--help"} & set(argv))


def lerobot_groups(flags: Mapping[str, Option]) -> dict[str, Option]:
    """Return the groups of LeRobot's own flags by prefix. A group is stored as a list of flags, `--chunk_size=20`."""
    return {name.removesuffix("*"): option for name, option in flags.items() if option.is_group}


# ---- parsing ------------------------------------------------------------------------------------------------------


def _parse[C](argv: Sequence[str], program: Program[C]) -> C:
    """Parse a command line into a configuration without checking options against each other.

    Later values replace earlier ones: those of a file, then the preset's and implied ones, then the command line's.
    """
    for before, arg in zip(["", *argv], argv, strict=False):  # first, as other errors repeat arguments
        flag = re.match(r"--[\w.]+(?==)", arg) or re.match(r"--[\w.]+$", before)
        refuse_credentials(arg, flag[0] if flag else "command line")
    flags, presets, names = program.flags, program.presets, dict(_pairs(argv, program))
    config: Any = program.config_type()
    if names.get("preset") not in (None, *presets):
        raise ValueError(f"--preset {names['preset']}: expected one of {', '.join(presets)}")
    resumed, file = _run_to_resume(names, program), names.pop("config_path", None)
    source = resumed or (as_file(file) if file else None)
    saved = dict(_saved_options(source, program.config_type)) if source else {}
    given = {path: value for path, value in saved.pop("given", {}).items() if path in saved}
    implied: dict[str, str] = {}
    if not resumed:
        saved |= given  # the plan decides anew
        if preset := names.get("preset"):
            was = _values(presets.get(saved.get("preset") or "", {}), config, flags)
            saved = {path: value for path, value in saved.items() if path not in was or was[path] != value}
            implied |= presets[preset]
    groups = {name.partition(".")[0] for name in names}
    implied |= {name: text for name, text in IMPLIED.items() if name.partition(".")[0] in groups}
    implied = {name: text for name, text in implied.items() if name not in _replaced(names, resumed)}
    replaced = {flags[name].path for name in _replaced([*implied, *names], resumed) if name in flags}
    for path in saved.keys() - replaced:
        set_option(config, path, saved[path])
    if resumed and names.get("preset", config.preset) != config.preset:
        raise ValueError(
            f"--preset {names['preset']} with --resume: the run was started with "
            f"{f'--preset {config.preset}' if config.preset else 'none'}, and its options stand; leave --preset out, "
            "and give the options that are to change"
        )
    for path, value in _values(implied | names, config, flags).items():
        set_option(config, path, value)
    named = {flags[name].path for name in names if name in flags}
    for path, value in given.items() if resumed else ():
        # A decision stays unless this command line gives the option another value; null has it decided anew.
        if path not in named or (value is not None and get_option(config, path) == value):
            set_option(config, path, saved[path])
            config.given[path] = value
    if isinstance(config, Config | ValueConfig):
        mixture = config.dataset.mixture
        if isinstance(mixture, str) and mixture.startswith("@"):
            config.dataset.mixture = read_mixture(mixture[1:])  # the file's present content, for a resumed run too
    return config


def _run_to_resume(names: dict[str, str], program: Program[Any]) -> Path | None:
    """Return config.json of the run that the flags resume, or None for a new run; decide `--resume auto` in `names`."""
    resume = names.get("resume", "false")
    if is_auto := resume.lower() == "auto":
        names["resume"] = resume = str(_config_of_run(names, program).is_file()).lower()
    if resume == "false" or not program.flags["resume"].read(resume):
        return None
    saved, other = _config_of_run(names, program), names.pop("config_path", None)
    if other and not is_auto and as_file(other).absolute() != saved.absolute():
        raise ValueError("--config_path with --resume: the run goes on with its own options; leave one of them out")
    if not saved.is_file():
        raise FileNotFoundError(
            f"--resume: {address(saved)} does not exist, so {address(saved.parent)} holds no run; leave --resume out "
            "to start one, or give --resume auto"
        )
    return saved


def _replaced(given: Iterable[str], resumed: Path | None) -> set[str]:
    """Return the flags whose preset's or saved values flags that are `given` replace."""
    rules = REPLACES if resumed else REPLACES | SOURCES
    keys = [key for name in given for key in (name, f"{name.partition('.')[0]}.*")]
    return {replaced for key in keys for replaced in rules.get(key, ())}


def _values(names: Mapping[str, str], config: Any, flags: Mapping[str, Option]) -> dict[str, Any]:
    """Return the values by path that flags set: of their options, of options `set_by` them, and of LeRobot's lists."""
    values: dict[str, Any] = {}
    others = {option.set_by: option for option in options_of(type(config)) if option.set_by}
    for name, text in names.items():
        prefix, _, suffix = name.partition(".")
        first, comma, last = text.partition(",")
        if name not in flags:  # an option of LeRobot's; a later value replaces an earlier one
            path = lerobot_groups(flags)[f"{prefix}."].path
            listed = {text.partition("=")[0]: text for text in values.get(path, get_option(config, path))}
            values[path] = list((listed | {f"--{suffix}": f"--{suffix}={text}"}).values())
        elif name not in others:
            values[flags[name].path] = flags[name].read(text)
        else:
            least = name == "scaling.num_workers"  # its minimum comes first
            try:
                values[name] = flags[name].read(last if least and comma else first)
                other = others[name]
                values[other.path] = other.read(first if least else last) if comma else other.default
            except ValueError:
                raise ValueError(f"--{name}={text}: expected {flags[name].expected}") from None
    return values


def _pairs(argv: Sequence[str], program: Program[Any]) -> list[tuple[str, str]]:
    """Split arguments into names and values: `--a b`, `--a=b`, or `--a` alone, which sets a boolean option to true."""
    flags = program.flags
    groups = tuple(lerobot_groups(flags))
    arguments: list[tuple[str, str | None]] = []
    for arg in argv:
        if arg.startswith("--"):
            name, equals, text = arg[2:].partition("=")
            arguments.append((name, text if equals else None))
        elif arguments and arguments[-1][1] is None:
            arguments[-1] = arguments[-1][0], arg
        else:
            raise ValueError(f"command line: {arg!r} belongs to no flag; flags look like --batch_size 8")
    pairs = []
    for name, value in arguments:
        if value is not None and not value.strip():
            raise ValueError(f"command line: --{name} is empty (an unset variable?): give a value, or leave it out")
        of_lerobot = program.config_type is Config or (
            program.config_type is EvaluateConfig and name.startswith(("job_name", "eval."))
        )
        if name not in flags and of_lerobot and (hint := answer(name)):
            raise ValueError(f"command line: LeRobot has --{name}; here: {hint}")
        is_option = name in flags and not flags[name].is_group
        in_group = name.startswith(groups) and re.fullmatch(r"[A-Za-z_][\w.]*", name.partition(".")[2])
        if not (is_option or in_group):
            meant = did_you_mean(name, [*(n for n in flags if not n.endswith("*")), "env.task"], "--")
            raise ValueError(f"command line: unknown flag --{name}{meant or '; --help lists them'}")
        if value is None and is_option and not flags[name].is_bool:
            raise ValueError(f"command line: --{name} needs a value")
        pairs.append((name, "true" if value is None else value))
    return pairs


def _saved_options(path: Path, config_type: type) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each option in a config.json, without the options in `PER_START`."""
    pull(path)
    file = address(path)
    try:
        saved = read_foreign_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read as JSON ({error}); give a run's {CONFIG_NAME}") from error
    refuse_credentials(json.dumps(saved), file)
    if not isinstance(saved, dict):
        raise ValueError(f"{file}: expected a JSON object; give a run's {CONFIG_NAME}")
    if {"policy", "dataset", "wandb"} <= saved.keys():
        raise ValueError(
            f"{file} is of lerobot-train, whose --config_path goes on with its own runs; here --output_dir FOLDER "
            "--resume goes on with a run, and --policy.path FOLDER/pretrained_model starts one from its policy"
        )
    options = {option.path: option for option in options_of(config_type)}
    for name, value in leaves(saved, options.keys()):
        if name not in options:
            if value is None:  # an option of an earlier version, without a value
                continue
            group = name.rpartition(".")[0]
            similar = (
                did_you_mean(name, list(options)) if group in {path.rpartition(".")[0] for path in options} else ""
            )
            remedy = similar or (
                "; delete its line if an earlier version wrote it, or give the file of a run of this program"
            )
            raise ValueError(f"{file}: {name} is no option{remedy}")
        if name not in PER_START:
            try:
                yield name, options[name].decode(value)
            except ValueError as error:
                raise ValueError(f"{file}: {error}") from None


def _config_of_run(names: Mapping[str, str], program: Program[Any]) -> Path:
    """Return the path of config.json in --output_dir, whether or not the file exists."""
    folder = names.get("output_dir") or program.presets.get(names.get("preset", ""), {}).get("output_dir")
    if folder is None:
        raise ValueError("--resume: say which run, --output_dir FOLDER")
    path = as_path(folder) / CONFIG_NAME
    pull(path)
    return path


# ---- help ---------------------------------------------------------------------------------------------------------


def _help_lines(option: Option) -> list[str]:
    title = f"  --{(option.name or '').replace('*', 'OPTION')} VALUE"
    values = "" if option.is_group else f" ({option.expected}; default {_default(option)})"
    return [title, *_wrapped(f"{option.help}{values}", "      ", "      ")]


def _settings(preset: Mapping[str, str]) -> str:
    return " ".join(f"--{flag} {value}" for flag, value in preset.items())


def _default(option: Option) -> str:
    value = option.default
    return "none" if value is None or value in ([], {}) else f"{value}".lower() if option.is_bool else f"{value}"


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text, 100, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def page() -> str:
    """Return the Markdown page of all flags."""
    lines = [
        "<!-- Written by `python -m vla_finetuning.options.command_line`. -->",
        "",
        "# Flags",
        "",
        "`--help` of each program prints the same. What `lerobot-train` has besides: "
        "[lerobot_train.md](lerobot_train.md).",
    ]
    printed: list[Option] = []
    for program in PROGRAMS:
        flags = program.flags
        new = [option for option in flags.values() if option not in printed]
        shared = [name for name, option in flags.items() if option in printed]
        lines += ["", f"## python {program.command}", "", program.summary]
        if program.presets:
            lines += ["", "Presets: flags that come before those given.", "", "| `--preset` | flags |", "|---|---|"]
            lines += [f"| `{name}` | `{_settings(preset)}` |" for name, preset in program.presets.items()]
        if shared:
            lines += ["", f"As above: {', '.join(f'`--{name}`' for name in shared)}."]
        for section in dict.fromkeys(option.section for option in new):
            lines += ["", f"### {section}", "", "| flag | values | default | |", "|---|---|---|---|"]
            lines += [_row(option) for option in new if option.section == section]
        printed += new
    return "\n".join(lines)


def _row(option: Option) -> str:
    cells = [*(("", "") if option.is_group else (option.expected, _default(option))), option.help]
    return f"| `--{option.name}` | {' | '.join(cell.replace('*', chr(92) + '*') for cell in cells)} |"


if __name__ == "__main__":
    print_safe_text(page())
