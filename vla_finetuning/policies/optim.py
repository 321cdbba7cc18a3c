"""How a policy learns: LeRobot's optimizer, parameter groups and learning rate schedule, as `lerobot-train` has them.

A policy type names its own (its *preset*); the options of a run replace what they name. LeRobot's own code builds all
of it; what the step needs of it is taken over: groups of what trains, and the rate as a function of the step.
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

from util import trainable_parameters, warmup_cosine
from vla_finetuning.lerobot_options import read_options
from vla_finetuning.options.programs import Config
from vla_finetuning.options.schedule import FINAL_LR_FRAC, WARMUP_FRAC

# The optimizers that are trained with, by LeRobot's names of their types.
NAMES = {"adam": "Adam", "adamw": "AdamW", "xvla-adamw": "AdamW of X-VLA", "sgd": "SGD", "muon": "Muon and AdamW"}
# One kernel, which leaves out a step whose gradients are not finite without the host's knowing.
FUSED = {"fused": True}


@OptimizerConfig.register_subclass("muon")
@dataclass
class MuonConfig(OptimizerConfig):
    """Muon for the matrices of a network's layers (`hidden_matrices`), AdamW for everything else.

    Attributes:
        lr, weight_decay: of both; Muon's update is scaled to the size of AdamW's ("match_rms_adamw" of torch).
        momentum, nesterov, ns_steps: of Muon. betas, eps: of AdamW.
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
        """Group the parameters, as LeRobot does for other types; `MuonAdamW` is made of the groups."""
        return torch.optim.AdamW(params, lr=self.lr)


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` over some matrices and `torch.optim.AdamW` over the rest, as one optimizer.

    As in fused optimizers, a step with `found_inf` 1.0 (0-d float32) changes nothing; the host does not read it.

    Args:
        groups: of parameters; other options of a group than `lr_scale` are dropped.
        matrices: parameters of two dimensions that Muon updates.
    """

    def __init__(self, groups: list[dict[str, Any]], matrices: set[nn.Parameter], config: MuonConfig):
        def select(in_muon: bool) -> list[dict[str, Any]]:
            chosen = (
                {"params": [p for p in group["params"] if (p in matrices) is in_muon], "lr_scale": group["lr_scale"]}
                for group in groups
            )
            return [group for group in chosen if group["params"]]

        shared: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
        momentum: dict[str, Any] = {
            "momentum": config.momentum,
            "nesterov": config.nesterov,
            "ns_steps": config.ns_steps,
        }
        muon, adamw = select(True), select(False)
        self._muon = torch.optim.Muon(muon, **shared, **momentum, adjust_lr_fn="match_rms_adamw") if muon else None
        self._adamw = torch.optim.AdamW(adamw, **shared, betas=config.betas, eps=config.eps, **FUSED) if adamw else None
        super().__init__([{"params": [parameter for group in groups for parameter in group["params"]]}], {})
        self.param_groups = []
        for optimizer in filter(None, (self._muon, self._adamw)):
            self.param_groups += optimizer.param_groups  # the same dictionaries: a rate set here counts there
            optimizer.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        if self._adamw is not None:
            self._adamw.grad_scale, self._adamw.found_inf = None, found_inf  # type: ignore[attr-defined]
            self._adamw.step()
        if self._muon is None:
            return
        params = [p for group in self._muon.param_groups for p in group["params"] if p.grad is not None]
        if found_inf is None:
            self._muon.step()
            return
        skipped, before = found_inf.bool(), [p.clone() for p in params]
        for p in params:  # a gradient equal to the momentum leaves the momentum as it is
            state = self.state[p]
            momentum = state["momentum_buffer"] if state else torch.zeros_like(p)
            p.grad.copy_(torch.where(skipped, momentum, p.grad))
        self._muon.step()
        for p, old in zip(params, before, strict=True):
            p.copy_(torch.where(skipped, old, p))


def hidden_matrices(policy: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of two dimensions within stacks of layers (a number is in their names).

    Muon is meant for these: embeddings, heads, convolutions, norms and biases are AdamW's.
    """
    embeddings = {module.weight for module in policy.modules() if isinstance(module, nn.Embedding)}
    return {
        parameter
        for name, parameter in policy.named_parameters()
        if parameter.ndim == 2 and parameter not in embeddings and any(part.isdigit() for part in name.split("."))
    }


@dataclass(frozen=True)
class Recipe:
    """How a run's policy learns.

    Attributes:
        optimizer: LeRobot's, with the learning rate that the policy's groups were meant for.
        peak: the highest learning rate of what has none of its own; the others' are in proportion.
        scheduler: LeRobot's; None for a constant rate, or where `short` says it.
        short: the shares of the steps that warm up, and of the peak that the rate falls to.
        own_groups: parameters are in the groups that the policy makes, not in one.
        clip_norm: of the gradient; infinite: it is not clipped.
    """

    optimizer: OptimizerConfig
    peak: float
    scheduler: LRSchedulerConfig | None
    short: tuple[float, float] | None
    own_groups: bool
    clip_norm: float

    def schedule(self, steps: int) -> Callable[[int], float]:
        """The learning rate before optimizer step n (from 0) of so many."""
        if self.short is not None:
            warmup, final = self.short
            return warmup_cosine(self.peak, self.peak * final, round(warmup * steps), steps)
        if self.scheduler is None:
            return lambda step: self.peak
        # Some of LeRobot's schedules look into the optimizer for the rate that they multiply.
        carrier = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=self.peak)
        disabled = logging.root.manager.disable
        logging.disable(max(disabled, logging.INFO))  # what LeRobot logs of it, `describe` says
        try:
            (factor,) = self.scheduler.build(carrier, steps).lr_lambdas
        finally:
            logging.disable(disabled)
        return lambda step: self.peak * factor(step)

    def describe(self, steps: int) -> list[str]:
        """In words, of a run of so many steps."""
        named = NAMES.get(self.optimizer.type, self.optimizer.type)
        if self.short is not None:
            warmup, final = self.short
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
        """Build LeRobot's optimizer over what trains, fused. Its groups' `lr_scale` are their rates' shares of `peak`.

        Raises:
            ValueError: something trains that the policy puts into no group.
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
    """Build LeRobot's optimizer, from whichever policy: X-VLA's takes parameters by name, and others do not."""
    by_name = optimizer.type == "xvla-adamw"
    return optimizer.build(named if by_name else params.values() if isinstance(params, dict) else params)


def make_recipe(config: Config, policy_config: PreTrainedConfig) -> Recipe:
    """Return what a run's options and the policy's preset amount to. Runs on the driver, and in the training worker.

    Raises:
        ValueError: an option that LeRobot's optimizer or schedule does not have, or a kind that is not trained with.
    """
    preset: Any = policy_config.get_optimizer_preset() if config.use_policy_training_preset else None
    planned: Any = policy_config.get_scheduler_preset() if config.use_policy_training_preset else None
    optimizer = _replaced(OptimizerConfig, preset, config.optimizer_options, "optimizer")
    short = None
    if config.warmup_frac is not None or config.final_lr_frac is not None:
        short = (
            WARMUP_FRAC if config.warmup_frac is None else config.warmup_frac,
            FINAL_LR_FRAC if config.final_lr_frac is None else config.final_lr_frac,
        )
    scheduler = None if short else _replaced(LRSchedulerConfig, planned, config.scheduler_options, "scheduler")
    if optimizer.type not in NAMES:
        raise ValueError(
            f"the optimizer of type {optimizer.type} is several; give --optimizer.type {' or '.join(NAMES)}, or train "
            "with lerobot-train"
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
            f"--optimizer.dampening={dampening}: its first step here would be another than torch's, as momentum begins "
            "with zeros; leave it out"
        )
    parameter = nn.Parameter(torch.zeros(1, 1))
    try:  # all that torch looks at, before there is a cluster
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
        short=short,
        own_groups=config.use_policy_training_preset,
        clip_norm=clip_norm if clip_norm > 0 else float("inf"),
    )


def _replaced(registry: Any, preset: Any, options: Iterable[str], group: str) -> Any:
    """A preset with what the options name replaced; another type takes from the preset what both have."""
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
    except TypeError as error:  # what has no default is not given
        raise ValueError(f"--{group}.type={type_name} needs more of its options {', '.join(names)}: {error}") from error
