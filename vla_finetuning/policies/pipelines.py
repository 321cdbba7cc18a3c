"""Make LeRobot's pre- and postprocessors with a dataset's statistics, or load and check those of a folder.

`make_processors` is for training and `load_processors` for players. `processors` splits a preprocessor between Ray
Data's tasks and the training worker.
"""

import copy
import inspect
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lerobot.configs import PreTrainedConfig
from lerobot.lerobot_types import TransitionKey
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.pi05.processor_pi05 import Pi05PrepareStateTokenizerProcessorStep
from lerobot.processor import (
    PolicyProcessorPipeline,
    ProcessorStepRegistry,
    TokenizerProcessorStep,
)
from lerobot.utils.constants import POLICY_POSTPROCESSOR_DEFAULT_NAME, POLICY_PREPROCESSOR_DEFAULT_NAME
from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer
from transformers.utils import cached_file

from vla_finetuning.data.hub import require_model
from vla_finetuning.files import read_foreign_json
from vla_finetuning.options.recap import ADVANTAGE
from vla_finetuning.policies.loading import MIGRATE, check_header
from vla_finetuning.policies.processors import TOKENIZER_FOLDER, Stats, with_steps
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.remote_code import RemoteCodeError, remote_code
from vla_finetuning.policies.tokenizer_check import check_tokenizer

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"

# Registered steps of LeRobot 0.6.1 that any policy may use. A policy's own steps are in its configuration's package.
# All others are refused: they control robots, teleoperators and environments, or load a second model.
SHARED_STEPS = frozenset(
    {
        *("rename_observations_processor", "device_processor", "normalizer_processor", "unnormalizer_processor"),
        *("to_batch_processor", "to_batch_processor_action", "to_batch_processor_observation"),
        *("to_batch_processor_complementary_data", "relative_actions_processor", "absolute_actions_processor"),
        *("tokenizer_processor", "action_tokenizer_processor", "smolvla_new_line_processor"),
    }
)


def make_processors(
    folder: Path | str | None,
    config: PreTrainedConfig,
    stats: Stats,
    *,
    trusted: bool = False,
) -> tuple[PolicyProcessorPipeline, PolicyProcessorPipeline]:
    """Make a policy's pre- and postprocessor on the CPU, normalising with a dataset's statistics.

    Like `lerobot-train`, it replaces statistics and features of the folder's own pipelines; they rename nothing.
    Without such pipelines, LeRobot's factory makes those of the policy's type.

    Args:
        folder: pretrained folder, or None.
        config: configuration of the policy, fitted to the dataset (`match_features`).
        stats: statistics by the policy's names: vectors, or (3, 1, 1) for images.
        trusted: whether code of the folder, or of repositories that its files name, may run.
    Raises:
        ValueError: a pipeline cannot be built or has a step that is not allowed; (`RemoteCodeError`) it would run
            untrusted code.
    """
    features = {**config.input_features, **config.output_features}
    config = copy.copy(config)
    config.device = "cpu"
    options: dict[str, Any] = {"dataset_stats": stats}
    family = family_of(config)
    folder = None if folder is None or family.rebuilds_processors else Path(folder)
    if folder is not None and (folder / f"{POLICY_PREPROCESSOR_DEFAULT_NAME}.json").is_file():
        steps = _saved_steps(folder, config)
        normalization = {"norm_map": config.normalization_mapping, "stats": stats}
        pre: dict[str, Any] = {
            "device_processor": {"device": "cpu"},
            "normalizer_processor": {"features": features, **normalization},
            "rename_observations_processor": {"rename_map": {}},
            **_tokenizer_overrides(folder, config, steps, trusted),
        }
        post: dict[str, Any] = {"unnormalizer_processor": {"features": config.output_features, **normalization}}
        relative = bool(getattr(config, "use_relative_actions", False))
        if relative or "relative_actions_processor" in steps:
            pre["relative_actions_processor"] = {
                "enabled": relative,
                "exclude_joints": getattr(config, "relative_exclude_joints", []),
                "action_names": getattr(config, "action_feature_names", None),
            }
        if relative or "absolute_actions_processor" in steps:
            post["absolute_actions_processor"] = {"enabled": relative}
        options |= {"pretrained_path": str(folder), "preprocessor_overrides": pre, "postprocessor_overrides": post}
    elif (tokenizer := family.tokenizer_name(config)) is not None:
        _check_named_tokenizer(config, tokenizer)
    try:
        with remote_code(trusted):
            preprocessor, postprocessor = make_pre_post_processors(config, **options)
    except RemoteCodeError:
        raise
    except (ValueError, KeyError, ImportError, OSError) as error:
        raise ValueError(
            f"the processors of the '{config.type}' policy{f' {folder}' if folder else ''} cannot be built: {error}"
        ) from error
    _keep_tokenizer_name(preprocessor)
    _check_prompt_length(config, preprocessor, folder)
    return preprocessor, postprocessor


def load_processors(
    folder: Path, config: PreTrainedConfig, *, trusted: bool = False
) -> tuple[PolicyProcessorPipeline, PolicyProcessorPipeline]:
    """Load the pipelines of a pretrained folder, as LeRobot does on a robot. Raises ValueError as `make_processors`."""
    overrides = _tokenizer_overrides(folder, config, _saved_steps(folder, config), trusted)
    if _find_saved_step(folder, "device_processor"):  # it names the device of the training
        overrides["device_processor"] = {"device": "cpu"}
    with remote_code(trusted):
        pipelines = make_pre_post_processors(config, pretrained_path=str(folder), preprocessor_overrides=overrides)
    _keep_tokenizer_name(pipelines[0])
    return pipelines


def saved_rename_map(folder: Path) -> dict[str, str]:
    """Return the rename map of a folder's own preprocessor. Raises ValueError or OSError for an unreadable file."""
    names = (_find_saved_step(folder, "rename_observations_processor").get("config") or {}).get("rename_map")
    return {str(key): str(name) for key, name in names.items()} if isinstance(names, dict) else {}


def saved_shapes(folder: Path, config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the statistics of a folder's preprocessor, by the policy's keys.

    The policy was trained on these shapes; its configuration may have padded vectors and more cameras. The result is
    empty if the folder has no statistics, or padded ones. Raises ValueError or OSError for an unreadable file.
    """
    name = _find_saved_step(folder, "normalizer_processor").get("state_file")
    if family_of(config).pads_statistics or not isinstance(name, str) or Path(name).name != name:
        return {}
    check_header(folder / name)
    shapes = {}
    try:
        with safe_open(folder / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                feature, _, statistic = key.rpartition(".")
                if statistic != "count":
                    shapes[feature] = tuple(file.get_slice(key).get_shape())
    except SafetensorError as error:
        raise ValueError(f"{folder / name} is no safetensors file: {error}") from error
    return shapes


def _find_saved_step(folder: Path, name: str) -> dict[str, Any]:
    """Return a step's entry in a folder's own preprocessor; empty if it has none."""
    file = folder / f"{POLICY_PREPROCESSOR_DEFAULT_NAME}.json"
    saved = read_foreign_json(file) if file.is_file() else {}
    steps = saved.get("steps") if isinstance(saved, dict) else None
    valid_steps = [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
    return next((step for step in valid_steps if step.get("registry_name") == name), {})


def _tokenizer_overrides(
    folder: Path, config: PreTrainedConfig, steps: Mapping[str, Mapping[str, Any]], trusted: bool
) -> dict[str, dict[str, Any]]:
    """Return overrides of a folder's tokenizer options by step, for LeRobot's factory.

    If the folder has its own copy of the tokenizer, the copy overrides the named one; else the named one is checked.
    `max_length` is overridden if the configuration has a larger `tokenizer_max_length` than the folder's.
    """
    overrides: dict[str, dict[str, Any]] = {}
    length = getattr(config, "tokenizer_max_length", None)
    if isinstance(length, int) and length != read_foreign_json(folder / "config.json").get("tokenizer_max_length"):
        for step, options in steps.items():
            if isinstance(options.get("max_length"), int) and options["max_length"] < length:
                overrides[step] = {"max_length": length}
    if "tokenizer_processor" in steps and (folder / TOKENIZER_FOLDER).is_dir():
        with remote_code(trusted):
            tokenizer = AutoTokenizer.from_pretrained(folder / TOKENIZER_FOLDER)
        overrides.setdefault("tokenizer_processor", {})["tokenizer"] = tokenizer
        return overrides
    for step, option in (("tokenizer_processor", "tokenizer_name"), ("eo1_qwen_processor", "processor_name")):
        if name := steps.get(step, {}).get(option):
            _check_named_tokenizer(config, name)
    return overrides


def _keep_tokenizer_name(preprocessor: PolicyProcessorPipeline) -> None:
    """Make tokenizer steps save the tokenizer's name for LeRobot: a step that holds an object does not save it."""
    for step in preprocessor.steps:
        if isinstance(step, TokenizerProcessorStep) and step.tokenizer_name:
            step.tokenizer = None


def _saved_steps(folder: Path, config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """Return the options of a folder's saved steps by registered name, after a check that LeRobot may build them."""
    # LeRobot 0.6.1 also accepts `{"class": "any.module.Callable", "config": {...}}` and calls it: a downloaded JSON
    # file could start a program.
    options_by_step: dict[str, dict[str, Any]] = {}
    for name in (POLICY_PREPROCESSOR_DEFAULT_NAME, POLICY_POSTPROCESSOR_DEFAULT_NAME):
        file = folder / f"{name}.json"
        try:
            steps = [
                (s["registry_name"], s.get("config", {}), s.get("state_file")) for s in read_foreign_json(file)["steps"]
            ]
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{folder} has no {file.name}: a policy needs both files of the processors that it was trained with; "
                f"weights from before LeRobot's processors are converted by {MIGRATE} --pretrained-path {folder}"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file} is no pipeline of steps that LeRobot has registered by name: {error!r}. Steps "
                "named by a Python class are refused, as the file could name any"
            ) from error
        for step, options, state_file in steps:
            if reason := _explain_refusal(step, options, state_file, config):
                raise ValueError(
                    f"{file}: the step {step!r:.100} {reason}; save the processors again with LeRobot, or remove both "
                    "processor files"
                )
            if state_file is not None:
                check_header(folder / state_file)
            options_by_step[step] = options
    check_tokenizer(folder / TOKENIZER_FOLDER / TOKENIZER_FILE)
    return options_by_step


def _explain_refusal(step: Any, options: Any, state_file: Any, config: PreTrainedConfig) -> str | None:
    """Explain why a saved step is refused; return None if it is allowed."""
    if step not in ProcessorStepRegistry.list():
        return "is not registered by LeRobot under that name"
    step_class = ProcessorStepRegistry.get(step)
    # Packages of the configuration and its base classes.
    config_modules = {base.__module__ for base in type(config).__mro__ if issubclass(base, PreTrainedConfig)}
    module = step_class.__module__
    if step not in SHARED_STEPS and not any(
        module == home or module.rpartition(".")[0] == home.rpartition(".")[0] for home in config_modules
    ):
        return f"does not belong to a '{config.type}' policy"
    params = inspect.signature(step_class).parameters
    if not isinstance(options, dict) or (unknown := sorted(map(str, options.keys() - params.keys()))):
        return f"has no options {unknown if isinstance(options, dict) else options!r:.100}, only {sorted(params)}"
    if state_file is not None and (not isinstance(state_file, str) or Path(state_file).name != state_file):
        return f"names the state file {state_file!r:.100}, which is not in its folder"
    return None


def _check_named_tokenizer(config: PreTrainedConfig, name: str) -> None:
    """Check a tokenizer in a folder, or on the Hub, from which it is fetched unless cached."""
    if Path(name).is_dir():
        check_tokenizer(Path(name) / TOKENIZER_FILE)
        return
    remedy = f"or put its files into the folder of the policy, as {TOKENIZER_FOLDER}/"
    try:
        require_model(name, "tokenizer_config.json")
        path = cached_file(name, TOKENIZER_FILE, _raise_exceptions_for_missing_entries=False)
    except (ValueError, OSError) as error:
        raise type(error)(f"the tokenizer of the '{config.type}' policy: {error}; {remedy}") from error
    if path is not None:
        check_tokenizer(Path(path))


def tokenizer_step(preprocessor: PolicyProcessorPipeline) -> Any:
    """Return the step that tokenises instructions, which has an `input_tokenizer`; None if there is none."""
    return next((step for step in preprocessor.steps if hasattr(step, "input_tokenizer")), None)


class StatelessPrompts(Pi05PrepareStateTokenizerProcessorStep):
    """Write LeRobot's prompts of PI0.5 without the state."""

    def __call__(self, transition: Any) -> Any:
        data = transition[TransitionKey.COMPLEMENTARY_DATA]
        tasks = [task.strip().replace("_", " ").replace("\n", " ") for task in data[self.task_key]]
        prompts = [f"Task: {task};\nAction: " for task in tasks]
        return {**transition, TransitionKey.COMPLEMENTARY_DATA: {**data, self.task_key: prompts}}


def without_state(preprocessor: PolicyProcessorPipeline) -> PolicyProcessorPipeline:
    """Return a pipeline whose prompts leave the state out, as openpi's for data without a state."""
    replaced = Pi05PrepareStateTokenizerProcessorStep
    steps = [StatelessPrompts() if isinstance(step, replaced) else step for step in preprocessor.steps]
    return with_steps(preprocessor, steps)


def check_prompts_differ(
    preprocessor: PolicyProcessorPipeline, instructions: Sequence[str], name: str, flag: str = "--recap.labels"
) -> None:
    """Refuse a policy whose tokens do not differ with the advantage at the end of an instruction."""
    tokenizer = tokenizer_step(preprocessor)
    if tokenizer is None:
        raise ValueError(
            f"{name}: its processors make no tokens of instructions, so the advantage in an instruction cannot reach "
            f"it: leave out {flag}"
        )
    for instruction in instructions:
        texts = [f"{instruction}{words}" for words in ("", *ADVANTAGE.values())]
        tokens = [tokenizer.input_tokenizer(text)["input_ids"] for text in texts]
        if len(set(map(tuple, tokens))) < len(tokens):
            raise ValueError(
                f"{name}: its tokenizer gives {texts[1]!r} and {texts[2]!r} the same tokens, so the policy could not "
                "tell them apart; start from a policy whose tokenizer knows the words"
            )
        if max(map(len, tokens)) > tokenizer.max_length:
            raise ValueError(
                f"{name}: {texts[1]!r} has {max(map(len, tokens))} tokens, and its prompts at most "
                f"{tokenizer.max_length}: the advantage would be cut off; shorten the instruction"
            )


def _check_prompt_length(config: PreTrainedConfig, preprocessor: PolicyProcessorPipeline, folder: Path | None) -> None:
    """Refuse a `tokenizer_max_length` below the `max_length` of the saved tokenizer step."""
    limit = getattr(config, "tokenizer_max_length", None)
    for step in preprocessor.steps:
        length = getattr(step, "max_length", None)
        if isinstance(limit, int) and isinstance(length, int) and length > limit:
            raise ValueError(
                f"--policy.tokenizer_max_length={limit}: the tokenizer saved in {folder} makes prompts of up to "
                f"{length} tokens; leave the option out, or give {length}"
            )
