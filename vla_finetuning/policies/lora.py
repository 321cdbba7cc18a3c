"""Add adapters (LoRA) to a policy: small trained matrices beside frozen weights, by the PEFT library.

LeRobot's `wrap_with_peft` chooses the layers, and PEFT replaces them by its own. Training, checkpoints and counts
select parameters by `requires_grad`, as they do without adapters.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from lerobot.policies.pretrained import PreTrainedPolicy

from vla_finetuning.options.fields import did_you_mean
from vla_finetuning.options.peft import PeftOptions


def add_adapters(policy: PreTrainedPolicy, options: PeftOptions, seed: int = 0) -> Any:
    """Add adapters to a policy in place and freeze its other parameters, as `lerobot-train --peft.*` does.

    Args:
        policy: a policy with `config.pretrained_path`, on any device, the meta device included.
        seed: seed of the adapters' initial weights. Does not change the process's random state.
    Returns:
        PEFT's model around the policy.
    Raises:
        ValueError: the options name no layers of the policy, or layers that cannot have adapters.
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
    policy.config.use_peft = False  # true only in the configuration of a folder of adapters
    return adapted


def adapted_layers(policy: PreTrainedPolicy, options: PeftOptions) -> tuple[str, ...]:
    """Describe in a line each what the names in `options` match, after `add_adapters` and all freezing.

    Raises ValueError if a name matches no layer, or only layers that training does not use.
    """
    layers = [name for name, _ in policy.named_modules()]
    trained = [(name, tensor.numel()) for name, tensor in policy.named_parameters() if tensor.requires_grad]
    targets = options.target_modules
    specs = [("target_modules", ".lora_", name) for name in ([targets] if isinstance(targets, str) else targets or [])]
    specs += [("full_training_modules", ".modules_to_save.", name) for name in options.full_training_modules or []]
    lines = []
    for option, mark, name in specs:
        pattern = option == "target_modules" and isinstance(targets, str)  # PEFT has refused a pattern without a match
        sizes: dict[str, int] = {}
        for parameter, count in trained:
            layer, marked, _ = parameter.partition(mark)
            # PEFT matches the names of fully trained layers as suffixes that need not begin after a dot.
            ends = f".{layer}".endswith(f".{name}") if option == "target_modules" else layer.endswith(name)
            if marked and (pattern or ends):
                sizes[layer] = sizes.get(layer, 0) + count
        if not sizes:
            exists = any(f".{layer}".endswith(f".{name}") for layer in layers) or pattern
            why = "only layers that training does not use" if exists else "no layer of the policy"
            layer_names = sorted({layer.rpartition(".")[2] for layer in layers})
            raise ValueError(f"--peft.{option}: {name!r} matches {why}{did_you_mean(name, layer_names)}")
        scope = "adapters in" if option == "target_modules" else "all of"
        lines.append(f"{scope} {name!r}: {sum(sizes.values()):,} parameters in {len(sizes)} layers, e.g. {min(sizes)}")
    return tuple(lines)
