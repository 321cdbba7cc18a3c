"""Find parameters that train but get no gradient, which DDP refuses unless it searches for them in every step.

    python -m diagnostics.find_unused_params --preset demo

The tool takes the flags of `vla.py` and runs its training step on several batches in this process, without Ray. Exit
status: 0 done, 1 --fail_if_unused found one, or the step failed, 2 it could not start.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from diagnostics.report import Environment, Record, Report, shares
from diagnostics.tool import NoOptimizer, Options, Result, count, host_batches, run_tool, truth, with_stub_stats
from util import UNWATCHED, Clock, cuda_prefetcher, train_step
from vla_finetuning.plan.resolve import Run, with_config
from vla_finetuning.policies.registry import family_of
from vla_finetuning.training.feed import policy_batches
from vla_finetuning.training.model import build_model, build_optimizer
from vla_finetuning.training.state import noise_for
from vla_finetuning.training.stream import RankSchedule

# `sometimes`: no gradient in some batches. `zero`: a gradient in all batches, always zero.
Fate = Literal["unused", "sometimes", "zero", "frozen", "used"]
MEANING: dict[Fate, str] = {
    "unused": "UNUSED     trains, and never gets a gradient: DDP refuses it, AdamW never moves it",
    "sometimes": "SOMETIMES  trains, and is without a gradient in some batches: DDP refuses those",
    "zero": "ZERO       trains, and its gradient was zero throughout: weight decay is all that moves it",
    "frozen": "FROZEN     does not train",
    "used": "USED       trains, and gets gradients",
}


class Parameter(Record):
    """A parameter of the policy. `without_gradient` is the number of batches without a gradient."""

    name: str
    shape: list[int]
    fate: Fate
    without_gradient: int

    @property
    def size(self) -> int:
        return int(torch.Size(self.shape).numel())


class UnusedReport(Report):
    """Result of `find_unused_params` after `batches` steps."""

    tool: Literal["find_unused_params"] = "find_unused_params"
    batches: int
    parameters: list[Parameter]

    def of(self, fate: Fate) -> list[Parameter]:
        return [parameter for parameter in self.parameters if parameter.fate == fate]

    @property
    def unreached(self) -> list[Parameter]:
        """Return the parameters that DDP refuses."""
        return self.of("unused") + self.of("sometimes")


def parse_options(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    options = Options(json="unused_json")
    options.add("unused_batches", count, 4, "batches to look at (4)")
    options.add("include_zero_grad", truth, False, "list parameters too whose gradient is zero in all of them")
    options.add("fail_if_unused", truth, False, "exit status 1 if a parameter that trains lacks a gradient")
    return options.parse_known_args(argv)


@dataclass
class _Inspector(NoOptimizer):
    """Count missing and zero gradients instead of updating parameters."""

    missing: Counter[str] = field(default_factory=Counter)
    zero: Counter[str] = field(default_factory=Counter)

    def step(self, number: int, clock: Clock = UNWATCHED) -> tuple[Tensor, Tensor]:
        for name, parameter in zip(self.names, self.params, strict=True):
            self.missing[name] += parameter.grad is None
            self.zero[name] += parameter.grad is not None and not parameter.grad.any()
            parameter.grad = None
        return super().step(number, clock)


def find_unused(run: Run, batches: int) -> UnusedReport:
    """Run one optimizer step on each of the run's first `batches` batches, and classify every parameter."""
    device = torch.device("cuda" if run.job.use_gpu else "cpu")
    loss, autocast = build_model(run.policy, device)
    inspector = _Inspector.of(build_optimizer(run.policy, loss, run.job.steps))
    # One worker, one micro-batch a step.
    alone = replace(run.config.scaling, num_workers=1, min_workers=None)
    run = with_config(run, replace(run.config, grad_accum=1, scaling=alone))
    schedule = RankSchedule(run.config.batch_size, run.rows.block_rows, 0, 1, 1)
    feed = policy_batches(cuda_prefetcher(host_batches(run, schedule, batches), device), run.policy.config)
    constants: dict[str, Any] = {"grad_accum": 1, "mean_over": 1, "autocast": autocast, "device": device}
    for step in range(batches):
        train_step(loss, inspector, feed, step=step, draws=noise_for(run.policy, step, schedule, device), **constants)

    def describe(name: str, parameter: Tensor) -> Parameter:
        fate: Fate = "zero" if inspector.zero[name] == batches else "used"
        if missing := inspector.missing[name]:
            fate = "unused" if missing == batches else "sometimes"
        fate = fate if parameter.requires_grad else "frozen"
        return Parameter(name=name, shape=list(parameter.shape), fate=fate, without_gradient=missing)

    parameters = [describe(name, parameter) for name, parameter in loss.policy.named_parameters()]
    where, config = Environment.here(), run.config.to_json()
    return UnusedReport(environment=where, config=config, batches=batches, parameters=parameters)


def table(report: UnusedReport, run: Run, include_zero_grad: bool) -> str:
    """Format the result as text, grouped by module; list only the number of used parameters."""
    step = f"{report.batches} batches of {run.config.batch_size} rows, --train.mode={run.config.train.mode}"
    lines = [f"{run.policy.config.type}, {run.policy.base['path']}: {step}"]
    for fate, meaning in MEANING.items():
        members, is_listed = report.of(fate), fate != "used" and (fate != "zero" or include_zero_grad)
        if is_listed or fate == "used":
            lines += ["", f"{meaning}: {_numbers(members)}"]
        elif members:
            lines += ["", f"{_numbers(members)} had a gradient of zero throughout: --include_zero_grad lists them."]
        if is_listed:
            lines += [f"  {name or '(everything)'}: {_numbers(group)}" for name, group in _groups(report, members)]
    return "\n".join([*lines, "", *advice(report, run)])


def _numbers(parameters: Sequence[Parameter]) -> str:
    tensors = len(parameters)
    return f"{tensors} tensor{'' if tensors == 1 else 's'}, {sum(p.size for p in parameters):,} parameters"


def _groups(report: UnusedReport, members: Sequence[Parameter]) -> Iterable[tuple[str, list[Parameter]]]:
    """Group parameters by the largest modules that contain no other parameters."""
    inside = Counter(prefix for p in report.parameters for prefix in _prefixes(p.name))
    chosen = Counter(prefix for p in members for prefix in _prefixes(p.name))
    groups: dict[str, list[Parameter]] = {}
    for parameter in members:
        module = next(prefix for prefix in _prefixes(parameter.name) if chosen[prefix] == inside[prefix])
        groups.setdefault(module, []).append(parameter)
    return groups.items()


def _prefixes(name: str) -> list[str]:
    """Return the prefixes of a dotted name, shortest first: `a.b` gives ``["", "a", "a.b"]``."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts) + 1)]


def advice(report: UnusedReport, run: Run) -> list[str]:
    """Return advice on the parameters that DDP refuses."""
    if not report.unreached:
        return ["Every parameter that trains got a gradient in every batch: DDP need not search."]
    family = family_of(run.policy.config)
    if family.modes:
        return [
            f"What a {family.type} never uses is frozen by trainable.choose_trainable: these are parts that its family "
            "does not know; add them to its `parts`, or set `reaches_all = False` in its loss to have DDP search for "
            "them in every step: several workers need one or the other."
        ]
    names = run.policy.config.__dataclass_fields__
    freezes = [f"--policy.{n}" for n in names if "freeze" in n or (n.startswith("train_") and n.endswith("_only"))]
    options = f": the policy has {', '.join(freezes)}." if freezes else "; the policy has no option for it."
    return [f"Freeze what is never used{options}"] * bool(report.of("unused")) + [
        f"DDP searches for them in every step of a {family.type}, as lerobot-train has it do, so several workers can "
        "train this."
    ]


def prepare(run: Run, options: Namespace) -> Callable[[], Result]:
    if run.job.use_gpu and not torch.cuda.is_available():
        raise ValueError(
            "the tool steps in this process, and this machine has no GPU: start it on a GPU node, or give "
            "--scaling.use_gpu false"
        )
    ready = with_stub_stats(run)  # statistics do not change which gradients exist

    def examine() -> Result:
        report = find_unused(ready, options.unused_batches)
        sizes = {fate: float(sum(p.size for p in report.of(fate))) for fate in MEANING}
        text, failed = table(report, ready, options.include_zero_grad), options.fail_if_unused and report.unreached
        return Result(report, text, [("Parameters", shares(sizes))], status=int(bool(failed)))

    return examine


main = partial(run_tool, doc=__doc__, parse_options=parse_options, prepare=prepare)


if __name__ == "__main__":
    sys.exit(main())
