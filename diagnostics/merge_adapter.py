"""Merge adapters into their base policy, so that vla.py, evaluate.py and robots can load it.

    python -m diagnostics.merge_adapter ADAPTER_FOLDER OUTPUT_FOLDER [--base FOLDER_OR_HUB_ID]

ADAPTER_FOLDER is written by LeRobot or by `vla.py --peft.export adapter`: config.json, adapter_config.json and
adapter_model.safetensors. adapter_config.json names the base unless --base does. Exit status: 0 written, 2 failed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from vla_finetuning.files import read_foreign_json, write_json
from vla_finetuning.options.environment import ENVIRONMENT_NAME
from vla_finetuning.options.policy import ROBOT_NAME
from vla_finetuning.policies.action_tokens import ACTION_TOKENIZER_FOLDER
from vla_finetuning.policies.loading import check_header, fetch_pretrained, load_policy, load_policy_config
from vla_finetuning.policies.pipelines import load_processors
from vla_finetuning.policies.saving import save_pretrained
from vla_finetuning.policies.trainable import with_float32_masters
from vla_finetuning.terminal import print_safe, print_safe_error

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def merge_adapter(adapter: Path, output: Path, base: str | None = None) -> None:
    """Write the merged policy to `output`, with the adapter's own configuration and processors."""
    from peft import PeftModel  # slow to import

    if output.exists():
        raise FileExistsError(f"{output} is there already; choose another folder")
    for name in ("config.json", ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (adapter / name).is_file():
            raise FileNotFoundError(f"{adapter} has no {name}: it is no folder of adapters as LeRobot writes it")
    check_header(adapter / ADAPTER_WEIGHTS)
    saved = read_foreign_json(adapter / ADAPTER_CONFIG)
    source = base or saved.get("base_model_name_or_path")
    if not isinstance(source, str):
        raise ValueError(f"{adapter / ADAPTER_CONFIG} names no base: give --base FOLDER_OR_HUB_ID")
    folder, _ = fetch_pretrained(source, None if base else saved.get("revision"))
    config = load_policy_config(adapter)
    policy = with_float32_masters(load_policy(folder, config))
    with warnings.catch_warnings():  # PEFT skips adapters of unknown layers with a warning
        warnings.filterwarnings("error", "Found missing adapter keys", UserWarning)
        try:
            adapted = PeftModel.from_pretrained(policy, str(adapter))
        except (UserWarning, RuntimeError) as error:  # other layers, or other sizes of them
            raise ValueError(f"{adapter / ADAPTER_WEIGHTS} is of other layers than {source} has: {error}") from error
    adapted.merge_and_unload()
    config.use_peft = False
    save_pretrained(policy, *load_processors(adapter, config), output, config)
    for name in (ROBOT_NAME, ENVIRONMENT_NAME):  # the base may have these files too, with other content
        if (adapter / name).is_file():
            write_json(output / name, read_foreign_json(adapter / name))
    if (adapter / ACTION_TOKENIZER_FOLDER).is_dir():
        shutil.copytree(adapter / ACTION_TOKENIZER_FOLDER, output / ACTION_TOKENIZER_FOLDER)
    print_safe(f"Policy       {output}: {adapter} merged into {source}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--base", help="a folder or a Hub id, instead of what adapter_config.json names")
    options = parser.parse_args(argv)
    try:
        merge_adapter(options.adapter, options.output, options.base)
    except (OSError, ValueError) as error:
        print_safe_error(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
