"""Write a trained policy, or its adapters, as a pretrained folder that LeRobot loads."""

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
from vla_finetuning.policies.processors import TOKENIZER_FOLDER, with_steps
from vla_finetuning.policies.registry import family_of


def save_pretrained(
    policy: PreTrainedPolicy,
    preprocessor: PolicyProcessorPipeline,
    postprocessor: PolicyProcessorPipeline,
    folder: Path,
    config: PreTrainedConfig | None = None,
    weights_of: Path | None = None,
) -> None:
    """Write a LeRobot pretrained folder. An existing folder is replaced atomically.

    The folder has config.json, model.safetensors, both processors with their statistics, and a copy of a tokenizer
    that LeRobot would fetch by name. It names no device and no local path. LeRobot's `from_pretrained` and
    `make_pre_post_processors` read it.

    Args:
        config: configuration to write; the policy's own if None.
        weights_of: folder to which the same policy was written before; its weights are hard-linked if possible.
    Raises:
        ValueError: the tokenizer has no name by which LeRobot would find it.
        OSError: the file system failed; nothing is left behind.
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
    """Write a LeRobot pretrained folder of a policy that uses PEFT: adapters, and the name of their base."""
    config = copy.deepcopy(config)
    config.use_peft = True
    with _pretrained_folder(folder, config, preprocessor, postprocessor) as partial:
        adapter_config = adapted.peft_config["default"]
        adapter_config.base_model_name_or_path, adapter_config.revision = base, revision
        adapted.save_pretrained(partial, save_embedding_layers=False)  # otherwise PEFT asks the Hub whether they grew
        (partial / "README.md").unlink(missing_ok=True)  # an empty template


@contextlib.contextmanager
def _pretrained_folder(
    folder: Path,
    config: PreTrainedConfig,
    preprocessor: PolicyProcessorPipeline,
    postprocessor: PolicyProcessorPipeline,
) -> Iterator[Path]:
    """Yield a temporary folder for the weights, then add all other files and rename it to `folder`."""
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
            steps = [
                DeviceProcessorStep("cpu", step.float_dtype) if isinstance(step, DeviceProcessorStep) else step
                for step in pipeline.steps
            ]
            with_steps(pipeline, steps).save_pretrained(partial, config_filename=f"{name}.json")
        family_of(config).save_fitted(partial)
        for path in partial.rglob("*.safetensors"):
            let_others_read(path)


def _save_tokenizer(preprocessor: PolicyProcessorPipeline, folder: Path) -> None:
    for step in preprocessor.steps:
        if type(step) is not TokenizerProcessorStep:
            continue  # subclasses save themselves
        if "tokenizer_name" not in step.get_config():
            raise ValueError(
                "the preprocessor's tokenizer was given as an object, and LeRobot saves only the name of one on "
                "the Hub: the policy could not be loaded again. Use a step that saves its tokenizer itself"
            )
        step.input_tokenizer.save_pretrained(folder / TOKENIZER_FOLDER)
