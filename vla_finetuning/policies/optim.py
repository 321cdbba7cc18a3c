"""Optimizer, parameter groups and learning rate schedule of a run, as in `lerobot-train`.

A policy type has a *preset*, whose fields the run's options replace (`make_recipe`). LeRobot's code builds optimizer
and schedule. `Recipe` turns them into a fused optimizer over the trained parameters and a function from step to rate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from lerobot.configs import PreTrainedConfig
from lerobot.optim import LRSchedulerConfig, OptimizerConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from util import trainable_parameters, warmup_cosine
from vla_finetuning.lerobot_options import read_options
from vla_finetuning.options.programs import Config
from vla_finetuning.options.schedule import FINAL_LR_FRAC, WARMUP_FRAC

# Display names of the supported optimizers by LeRobot's type.
NAMES = {"adam": "Adam", "adamw": "AdamW", "xvla-adamw": "AdamW of X-VLA", "sgd": "SGD", "muon": "Muon and AdamW"}
# A fused kernel skips a step with non-finite gradients without a host sync.
FUSED = {"fused": True}


@OptimizerConfig.register_subclass("muon")
@dataclass
class MuonConfig(OptimizerConfig):
    """Muon for the matrices of a network's layers (`hidden_matrices`), AdamW for all other parameters.

    Rate and weight decay are of both; Muon's update is scaled to the size of AdamW's (torch's "match_rms_adamw").
    """

    lr: float = 1e-4
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    grad_clip_norm: float = 1.0

    def build(self, params: Any) -> torch.optim.Optimizer:
        """Return an optimizer that only groups the parameters; `Recipe.build` makes `MuonAdamW` from its groups."""
        return torch.optim.AdamW(params, lr=self.lr)


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` over `matrices` and `torch.optim.AdamW` over other parameters, as one optimizer.

    As in fused optimizers, a step with `found_inf` 1.0 (0-d float32) changes nothing, without a host sync. Of each
    group, `params` and `lr_scale` are used.
    """

    def __init__(self, groups: list[dict[str, Any]], matrices: set[nn.Parameter], config: MuonConfig):
        def select(in_muon: bool) -> list[dict[str, Any]]:
            chosen = (
                {"params": [p for p in group["params"] if (p in matrices) is in_muon], "lr_scale": group["lr_scale"]}
                for group in groups
            )
            return [group for group in chosen if group["params"]]

        shared: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
        momentum: dict[str, Any] = {name: getattr(config, name) for name in ("momentum", "nesterov", "ns_steps")}
        muon, adamw = select(True), select(False)
        self._muon = torch.optim.Muon(muon, **shared, **momentum, adjust_lr_fn="match_rms_adamw") if muon else None
        self._adamw = torch.optim.AdamW(adamw, **shared, betas=config.betas, eps=config.eps, **FUSED) if adamw else None
        super().__init__([{"params": [parameter for group in groups for parameter in group["params"]]}], {})
        self.param_groups = []
        for optimizer in filter(None, (self._muon, self._adamw)):
            self.param_groups += optimizer.param_groups  # shared dictionaries: a rate set here also applies there
            optimizer.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        found_inf: torch.Tensor = self.found_inf  # type: ignore[attr-defined]  # set by `TrainableOptimizer.step`
        if self._adamw is not None:
            self._adamw.grad_scale, self._adamw.found_inf = None, found_inf  # type: ignore[attr-defined]
            self._adamw.step()
        if self._muon is None:
            return
        params = [p for group in self._muon.param_groups for p in group["params"] if p.grad is not None]
        skipped, before = found_inf.bool(), [p.clone() for p in params]
        for p in params:  # a gradient equal to the momentum does not change the momentum
            state = self.state[p]
            momentum = state["momentum_buffer"] if state else torch.zeros_like(p)
            p.grad.copy_(torch.where(skipped, momentum, p.grad))
        self._muon.step()
        for p, old in zip(params, before, strict=True):
            p.copy_(torch.where(skipped, old, p))


def hidden_matrices(policy: nn.Module) -> set[nn.Parameter]:
    """Return the two-dimensional parameters in stacks of layers, which have a number in their names.

    Muon is meant for these; AdamW updates embeddings, heads, convolutions, norms and biases.
    """
    embeddings = {module.weight for module in policy.modules() if isinstance(module, nn.Embedding)}
    return {
        parameter
        for name, parameter in policy.named_parameters()
        if parameter.ndim == 2 and parameter not in embeddings and any(part.isdigit() for part in name.split("."))
    }


@dataclass(frozen=True)
class Recipe:
    """Optimizer and schedule of a run.

    Attributes:
        optimizer: LeRobot's configuration, with the learning rate that the policy's groups are relative to.
        peak: highest learning rate of groups without a rate of their own; other groups' rates are in proportion.
        scheduler: LeRobot's configuration; None for a constant rate or if `cosine_shares` is set.
        cosine_shares: warm-up steps as a share of all steps, and final rate as a share of `peak`.
        own_groups: whether the policy groups its parameters; otherwise they are one group.
    """

    optimizer: OptimizerConfig
    peak: float
    scheduler: LRSchedulerConfig | None
    cosine_shares: tuple[float, float] | None
    own_groups: bool
    clip_norm: float

    def schedule(self, steps: int) -> Callable[[int], float]:
        """Return a function from an optimizer step (from 0) of `steps` to its learning rate."""
        if self.cosine_shares is not None:
            warmup, final = self.cosine_shares
            return warmup_cosine(self.peak, self.peak * final, round(warmup * steps), steps)
        if self.scheduler is None:
            return lambda step: self.peak
        # Some of LeRobot's schedules read the base rate from the optimizer.
        carrier = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=self.peak)
        disabled = logging.root.manager.disable
        logging.disable(max(disabled, logging.INFO))  # `describe` says what LeRobot logs
        try:
            built = self.scheduler.build(carrier, steps)
        finally:
            logging.disable(disabled)
        if not isinstance(built, LambdaLR):
            raise ValueError(
                f"the policy's {type(self.scheduler).__name__} makes a {type(built).__name__}, and rates are computed "
                "from a LambdaLR: give --warmup_frac or --final_lr_frac, which replace it"
            )
        (factor,) = built.lr_lambdas
        return lambda step: self.peak * factor(step)

    def describe(self, steps: int) -> list[str]:
        """Describe the rates and the optimizer of a run of `steps` steps."""
        named = NAMES.get(self.optimizer.type, self.optimizer.type)
        if self.cosine_shares is not None:
            warmup, final = self.cosine_shares
            return [
                f"rate up to {self.peak:g} in {round(warmup * steps)} steps, then a cosine down to "
                f"{self.peak * final:g} at step {steps}; {named}"
            ]
        if self.scheduler is None:
            return [f"rate {self.peak:g} throughout, as the policy has no schedule; {named}"]
        rate = self.schedule(steps)
        options = ", ".join(f"{key} {value}" for key, value in asdict(self.scheduler).items() if value is not None)
        return [
            f"rate {rate(0):g} in the first of {steps} steps, at most {self.peak:g}, {rate(steps - 1):g} in the last; "
            f"{named}",
            f"LeRobot's schedule {self.scheduler.type} ({options})",
        ]

    @property
    def state_kinds(self) -> list[set[str]]:
        """Return the sets of prefixes that the names of this optimizer's state in a checkpoint may have."""
        adam, momentum = {"exp_avg", "exp_avg_sq", "step"}, {"momentum_buffer"}
        if self.optimizer.type == "muon":  # either of its two optimizers may have no parameter
            return [adam | momentum, adam, momentum]
        if self.optimizer.type == "sgd":
            return [momentum if getattr(self.optimizer, "momentum", 0) else set()]
        return [adam]

    def build(self, policy: PreTrainedPolicy) -> torch.optim.Optimizer:
        """Build LeRobot's optimizer over the trained parameters, fused; `lr_scale` of a group is its rate over `peak`.

        Raises ValueError if a trained parameter is in none of the policy's groups.
        """
        trained = trainable_parameters(policy)
        params = policy.get_optim_params() if self.own_groups else policy.parameters()
        built = _build(self.optimizer, params, dict(policy.named_parameters()))
        groups = [
            {
                **group,
                "params": [param for param in group["params"] if param.requires_grad],
                **FUSED,
                "lr_scale": group["lr"] / self.optimizer.lr,
            }
            for group in built.param_groups
        ]
        grouped = {id(param) for group in groups for param in group["params"]}
        if lost := [name for name, param in trained.items() if id(param) not in grouped]:
            raise ValueError(
                f"a '{policy.config.type}' policy's optimizer leaves out {len(lost)} parameters that train, e.g. "
                f"{lost[0]}: they would be counted in the gradient's norm and never change"
            )
        groups = [group for group in groups if group["params"]]
        if isinstance(self.optimizer, MuonConfig):
            return MuonAdamW(groups, hidden_matrices(policy), self.optimizer)
        names = ("lr", "betas", "eps", "weight_decay")
        constants = {name: built.defaults[name] for name in names if name in built.defaults}
        return type(built)(groups, **constants, **FUSED)


def _build(optimizer: Any, params: Any, named: dict[str, nn.Parameter]) -> Any:
    """Build LeRobot's optimizer; X-VLA's takes a dict of parameters by name, others take parameters."""
    by_name = optimizer.type == "xvla-adamw"
    return optimizer.build(named if by_name else params.values() if isinstance(params, dict) else params)


def make_recipe(config: Config, policy_config: PreTrainedConfig) -> Recipe:
    """Combine the policy's preset with the run's options.

    Raises:
        ValueError: LeRobot's optimizer or schedule lacks an option or refuses its value, or its type is not supported.
    """
    preset: Any = policy_config.get_optimizer_preset() if config.use_policy_training_preset else None
    scheduler_preset: Any = policy_config.get_scheduler_preset() if config.use_policy_training_preset else None
    optimizer = _override_preset(OptimizerConfig, preset, config.optimizer_options, "optimizer")
    scheduler = cosine_shares = None
    if config.warmup_frac is None and config.final_lr_frac is None:
        scheduler = _override_preset(LRSchedulerConfig, scheduler_preset, config.scheduler_options, "scheduler")
    else:
        cosine_shares = (
            WARMUP_FRAC if config.warmup_frac is None else config.warmup_frac,
            FINAL_LR_FRAC if config.final_lr_frac is None else config.final_lr_frac,
        )
    if optimizer.type not in NAMES:
        raise ValueError(
            f"the policy trains with several optimizers ({optimizer.type}), which is not supported here; give "
            f"--optimizer.type {' or '.join(NAMES)}, or train with lerobot-train"
        )
    if config.scaling.strategy != "ddp" and optimizer.type in ("sgd", "muon"):
        raise ValueError(
            f"--optimizer.type={optimizer.type} with --scaling.strategy={config.scaling.strategy}: parameters in "
            "shards are updated by Adam alone; give --scaling.strategy=ddp or --optimizer.type=adamw"
        )
    if not 0 < optimizer.lr < float("inf"):
        raise ValueError(f"--optimizer.lr={optimizer.lr}: must be positive")
    if dampening := getattr(optimizer, "dampening", 0):
        raise ValueError(
            f"--optimizer.dampening={dampening} is not supported: momentum starts at zero here, so the first step "
            "would differ from torch's; leave it out"
        )
    parameter = nn.Parameter(torch.zeros(1, 1))
    try:  # torch checks the options, before a cluster starts
        built = _build(optimizer, [parameter], {"weight": parameter})
        if isinstance(optimizer, MuonConfig):
            MuonAdamW([{"params": [parameter], "lr_scale": 1.0}], {parameter}, optimizer)
    except (ValueError, TypeError) as error:
        raise ValueError(f"--optimizer.* of {optimizer.type}: {error}") from error
    if wrong := {key: value for key, value in built.defaults.items() if value != value or value == float("inf")}:
        raise ValueError(f"--optimizer.* of {optimizer.type}: expected finite numbers, found {wrong}")
    clip_norm = optimizer.grad_clip_norm
    return Recipe(
        optimizer=optimizer,
        peak=config.lr or optimizer.lr,
        scheduler=scheduler,
        cosine_shares=cosine_shares,
        own_groups=config.use_policy_training_preset,
        clip_norm=clip_norm if clip_norm > 0 else float("inf"),
    )


def _override_preset(registry: Any, preset: Any, options: Iterable[str], group: str) -> Any:
    """Return the preset with fields replaced by options; a new type inherits the fields that the preset also has."""
    values = dict(option.removeprefix("--").split("=", 1) for option in options)
    type_name = values.pop("type", None)
    classes = registry.get_known_choices()
    if type_name is not None and type_name not in classes:
        raise ValueError(f"--{group}.type={type_name}: expected one of {', '.join(sorted(classes))}")
    if type_name is None and preset is None:
        if values:
            raise ValueError(f"--{group}.{min(values)}: the policy has no {group} of its own; give --{group}.type too")
        return None
    chosen = classes[type_name] if type_name is not None else type(preset)
    names = [field.name for field in fields(chosen)]
    shared = {name: getattr(preset, name) for name in names if hasattr(preset, name)}
    try:
        return chosen(**shared | read_options(chosen, group, values))
    except TypeError as error:  # an option without a default is missing
        raise ValueError(f"--{group}.type={type_name} needs more of its options {', '.join(names)}: {error}") from error
