"""Write a trained policy as LeRobot loads it."""

import contextlib
import copy
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lerobot.configs import PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.processor import DeviceProcessorStep, PolicyProcessorPipeline, TokenizerProcessorStep
from lerobot.utils.constants import POLICY_POSTPROCESSOR_DEFAULT_NAME, POLICY_PREPROCESSOR_DEFAULT_NAME
from safetensors.torch import save_model

from vla_finetuning.files import atomic_folder, let_others_read
from vla_finetuning.policies.loading import WEIGHTS_FILE
from vla_finetuning.policies.lora import write_adapters
from vla_finetuning.policies.processors import TOKENIZER_FOLDER
from vla_finetuning.policies.registry import family_of


def save_pretrained(
    policy: PreTrainedPolicy,
    preprocessor: PolicyProcessorPipeline,
    postprocessor: PolicyProcessorPipeline,
    folder: Path,
    config: PreTrainedConfig | None = None,
    weights_of: Path | None = None,
) -> None:
    """Write what LeRobot calls a pretrained policy. An existing folder is replaced, never half-written.

    config.json, model.safetensors, both processors with their statistics, and the tokenizer if LeRobot
    would fetch it by name. No device and no local path is in it. `from_pretrained` and
    `make_pre_post_processors` of LeRobot read it.

    Args:
        config: what is written of the policy's configuration; its own when None.
        weights_of: a folder that the same policy was written to, whose weights this one shares (as one file under two
            names, where the file system has that).

    Raises:
        ValueError: the tokenizer has no name under which LeRobot would find it.
        OSError: of the file system; nothing is left behind.
    """
    with _pretrained_folder(folder, config or policy.config, preprocessor, postprocessor) as partial:
        if weights_of is not None:
            try:
                os.link(weights_of / WEIGHTS_FILE, partial / WEIGHTS_FILE)
            except OSError:  # a file system without hard links
                shutil.copyfile(weights_of / WEIGHTS_FILE, partial / WEIGHTS_FILE)
        else:
            save_model(policy, str(partial / WEIGHTS_FILE))


def save_adapters(
    adapted: Any,
    base: str,
    revision: str | None,
    preprocessor: PolicyProcessorPipeline,
    postprocessor: PolicyProcessorPipeline,
    folder: Path,
    config: PreTrainedConfig,
) -> None:
    """Write what LeRobot calls a pretrained policy that uses PEFT: adapters, and where the other weights are.

    Args:
        adapted: from `lora.add_adapters`. config: what is written of its policy's configuration. The others as for
            `save_pretrained`, and `lora.write_adapters`.
    """
    config = copy.deepcopy(config)
    config.use_peft = True
    with _pretrained_folder(folder, config, preprocessor, postprocessor) as partial:
        write_adapters(adapted, base, revision, partial)


@contextlib.contextmanager
def _pretrained_folder(
    folder: Path,
    config: PreTrainedConfig,
    preprocessor: PolicyProcessorPipeline,
    postprocessor: PolicyProcessorPipeline,
) -> Iterator[Path]:
    """Yield a temporary folder with a pretrained policy's all but its weights; it then takes the place of `folder`."""
    with atomic_folder(folder, replace=True) as partial:
        partial.mkdir()
        config = copy.deepcopy(config)
        config.device = None
        config.pretrained_path = None
        config._save_pretrained(partial)
        yield partial
        _save_tokenizer(preprocessor, partial)
        for pipeline, name in (
            (preprocessor, POLICY_PREPROCESSOR_DEFAULT_NAME),
            (postprocessor, POLICY_POSTPROCESSOR_DEFAULT_NAME),
        ):
            pipeline = copy.copy(pipeline)
            pipeline.steps = [
                DeviceProcessorStep("cpu", step.float_dtype) if isinstance(step, DeviceProcessorStep) else step
                for step in pipeline.steps
            ]
            pipeline.save_pretrained(partial, config_filename=f"{name}.json")
        family_of(config).save_fitted(partial)
        for path in partial.rglob("*.safetensors"):
            let_others_read(path)


def _save_tokenizer(preprocessor: PolicyProcessorPipeline, folder: Path) -> None:
    for step in preprocessor.steps:
        if type(step) is not TokenizerProcessorStep:
            continue  # other classes know how to save themselves
        if "tokenizer_name" not in step.get_config():
            raise ValueError(
                "the preprocessor's tokenizer was given as an object, and LeRobot saves only the name of one on "
                "the Hub: the policy could not be loaded again. Use a step that saves its tokenizer itself"
            )
        step.input_tokenizer.save_pretrained(folder / TOKENIZER_FOLDER)
