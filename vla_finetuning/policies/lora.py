"""Adapters: small matrices beside frozen weights, trained in their place (LoRA), by the PEFT library.

LeRobot's `wrap_with_peft` says which layers get them; PEFT puts its own layers into the policy, in the places of those,
and computes. What a run trains, checkpoints and counts is then found by `requires_grad`, as without them.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lerobot.policies.pretrained import PreTrainedPolicy

from vla_finetuning.options.fields import did_you_mean
from vla_finetuning.options.peft import PeftOptions


def add_adapters(policy: PreTrainedPolicy, options: PeftOptions, seed: int = 0) -> Any:
    """Put adapters into a policy, in place, as `lerobot-train --peft.*` does; nothing else of it trains from here on.

    Args:
        policy: made for a pretrained folder (`config.pretrained_path`), on any device; the meta device will do.
        seed: of the adapters' initial weights. The process's random state is left alone.
    Returns:
        PEFT's model around the policy, for `merge` and `write_adapters`.
    Raises:
        ValueError: the options name no layers of this policy, or layers that have no adapter.
    """
    overrides = asdict(options)
    del overrides["export"]
    device = next(policy.parameters()).device
    try:
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(seed)
            adapted = policy.wrap_with_peft(peft_cli_overrides=overrides)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"--peft.target_modules={options.target_modules} --peft.full_training_modules="
            f"{options.full_training_modules}: {' '.join(str(error).split())}"
        ) from error
    policy.config.use_peft = False  # the configuration is the run's; it is true of a folder of adapters alone
    return adapted


def adapted_layers(policy: PreTrainedPolicy, options: PeftOptions) -> tuple[str, ...]:
    """Return what each name of `options` matched, a line each, after `add_adapters` and what freezes besides.

    Raises:
        ValueError: a name that matches no layer, or only layers that training does not use.
    """
    layers = [name for name, _ in policy.named_modules()]
    trained = [(name, tensor.numel()) for name, tensor in policy.named_parameters() if tensor.requires_grad]
    targets = options.target_modules
    specs = [("target_modules", ".lora_", name) for name in ([targets] if isinstance(targets, str) else targets or [])]
    specs += [("full_training_modules", ".modules_to_save.", name) for name in options.full_training_modules or []]
    lines = []
    for option, mark, name in specs:
        pattern = option == "target_modules" and isinstance(targets, str)  # that matches none, PEFT has refused
        sizes: dict[str, int] = {}
        for parameter, count in trained:
            layer, marked, _ = parameter.partition(mark)
            # As PEFT: names of layers that train whole need not begin after a dot.
            ends = f".{layer}".endswith(f".{name}") if option == "target_modules" else layer.endswith(name)
            if marked and (pattern or ends):
                sizes[layer] = sizes.get(layer, 0) + count
        if not sizes:
            exists = any(f".{layer}".endswith(f".{name}") for layer in layers) or pattern
            why = "only layers that training does not use" if exists else "no layer of the policy"
            layer_names = sorted({layer.rpartition(".")[2] for layer in layers})
            raise ValueError(f"--peft.{option}: {name!r} is the name of {why}{did_you_mean(name, layer_names)}")
        scope = "adapters in" if option == "target_modules" else "all of"
        lines.append(f"{scope} {name!r}: {sum(sizes.values()):,} parameters in {len(sizes)} layers, e.g. {min(sizes)}")
    return tuple(lines)


def merge(adapted: Any) -> None:
    """Add what the adapters amount to onto the weights beside them; the policy is LeRobot's own again, in place."""
    adapted.merge_and_unload()


def write_adapters(adapted: Any, base: str, revision: str | None, folder: Path) -> None:
    """Write adapter_model.safetensors and adapter_config.json into a folder, for LeRobot and PEFT.

    Args:
        base: the folder or Hub id that the other weights are loaded from, at this `revision`.
    """
    config = adapted.peft_config["default"]
    config.base_model_name_or_path, config.revision = base, revision
    adapted.save_pretrained(folder, save_embedding_layers=False)  # else it would ask the Hub whether they grew
    (folder / "README.md").unlink(missing_ok=True)  # a form to fill in
