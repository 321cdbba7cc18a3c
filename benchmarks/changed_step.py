"""Does another way to compute the step cost success? The demo's policy, trained as ever and with options changed.

    python -m benchmarks.changed_step --change train.moments=bf16 --seeds 1000,1001,1002,1003,1004 --json FILE
    python -m benchmarks.changed_step --change train.fp8=all --seeds 1000,1001,1002,1003,1004 --json FILE
    python -m benchmarks.changed_step --start_steps 300 --both train.mode=expert --change train.fp8=frozen --json FILE

For each seed two policies learn from the same weights, rows and noise, by the program's own step in this process: one
plain, one with the options that `--change` names. Both then play the same unseen scenes. Options are those of the demo,
but for one worker in place of two, and the statistics that the dataset stores; and those of `--both`. With
`--start_steps` both start from a policy that trained for so many steps of the plain demo before. The result is written
after each seed; the same command goes on where it was broken off.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor

from diagnostics.report import Environment
from util import Batch, NumpyToTorchCollate, train_step
from vla_finetuning.config import PRESETS
from vla_finetuning.envs.configs import env_config, task_makers
from vla_finetuning.envs.stage import Stage, Start
from vla_finetuning.evaluation.intervals import Comparison, share, wilson
from vla_finetuning.evaluation.player import Player
from vla_finetuning.files import read_json, write_json
from vla_finetuning.flags import parse_args
from vla_finetuning.run.resolve import Run, resolve
from vla_finetuning.terminal import tell, tell_error, tell_text
from vla_finetuning.training.batches import collate_cut, noise_for, policy_batches
from vla_finetuning.training.model import build_model, build_optimizer, make_prepare
from vla_finetuning.training.stream import Dealt

KINDS = ("plain", "changed")
CPU, ENVIRONMENT = torch.device("cpu"), "two_bins"
# Of the first scene; the demo's own evaluation begins there too.
FIRST_SCENE = 1000


def resolved(folder: Path, seed: int, steps: int | None, changes: Sequence[str] = ()) -> Run:
    """The demo's run by one worker, with options changed, each as NAME=VALUE."""
    rows = int(PRESETS["demo"]["batch_size"]) * int(PRESETS["demo"]["scaling.num_workers"])
    flags: dict[str, Any] = {
        "preset": "demo",
        "dataset.statistics": "stored",  # an exact pass needs a cluster
        "output_dir": folder,
        "scaling.num_workers": 1,
        "scaling.use_gpu": "false",
        "batch_size": rows,
        "seed": seed,
    }
    if steps is not None:
        flags["steps"] = steps
    given = [*(f"{name}={value}" for name, value in flags.items()), *changes]
    return resolve(parse_args([f"--{option}" for option in given]), gpus_found=0)


def batches_of(run: Run) -> list[Batch]:
    """All of the run's batches, read once for both policies."""
    dealt, prepare, collate = dealt_by(run), make_prepare(run.policy, run.rows), NumpyToTorchCollate(False)
    source, size = run.rows.source(), run.config.batch_size
    return [
        collate_cut(collate, run.policy.prompts, prepare(rows))
        for step in range(run.job.steps)
        for rows in source.read_rows(dealt.rows(step).tolist(), size)
    ]


def dealt_by(run: Run) -> Dealt:
    return Dealt(run.config.batch_size, run.rows.block_rows, 0, 1, run.job.batches_per_step)


def trained(
    run: Run, batches: Sequence[Batch], start: Mapping[str, Tensor] = MappingProxyType({})
) -> tuple[PreTrainedPolicy, float]:
    """The policy after the run's steps, and the mean loss of the last tenth of them.

    Args:
        start: weights in place of those that the run starts from, by name.
    """
    loss, autocast = build_model(run.policy, CPU)
    loss.policy.load_state_dict(start, strict=False)
    optimizer = build_optimizer(run.policy, loss, run.job.steps)
    feed, dealt, losses = policy_batches(iter(batches), run.policy.config), dealt_by(run), []
    for step in range(run.job.steps):
        result = train_step(
            loss,
            optimizer,
            feed,
            step=step,
            grad_accum=1,
            mean_over=1,
            draws=noise_for(run.policy, step, dealt, CPU),
            autocast=autocast,
            device=CPU,
        )
        losses.append(result.loss.item())
    policy = run.policy.start()
    assert not policy.load_state_dict({**start, **optimizer.named()}, strict=False).unexpected_keys
    last = losses[-max(1, len(losses) // 10) :]
    return policy, sum(last) / len(last)


def played(run: Run, policy: PreTrainedPolicy, episodes: int, seed: int) -> list[bool]:
    """Whether each of so many episodes succeeded, by its number; all are played at once."""
    player = Player(policy, *run.policy.processors(), env=env_config(ENVIRONMENT), rename_map={})
    stage = Stage(task_makers(env_config(ENVIRONMENT)), slots=episodes, step_limit_s=600.0)
    begin = [Start(number, ENVIRONMENT, FIRST_SCENE + number) for number in range(episodes)]
    chunks, succeeded = None, [False] * episodes
    while True:
        (ended, waiting), seen = stage.advance(begin, chunks)
        begin = []
        for episode in ended:
            succeeded[episode.number] = episode.success_once
        if seen is None:
            return succeeded
        keys = [(seed, ENVIRONMENT, decision.number, decision.decision) for decision in waiting]
        chunks = player(seen, [decision.instruction for decision in waiting], keys)


def of_seed(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Both policies of a seed: the successes of each, and its loss in the end."""
    with tempfile.TemporaryDirectory(prefix="changed-step-") as name:
        folder, start = Path(name), dict[str, Tensor]()
        if options.start_steps:
            run = resolved(folder / "start", seed, options.start_steps)
            start = trained(run, batches_of(run))[0].state_dict()
        changes = {"plain": options.both, "changed": [*options.both, *options.change]}
        runs = {kind: resolved(folder / kind, seed, options.steps, changes[kind]) for kind in KINDS}
        batches = batches_of(runs["plain"])
        found: dict[str, Any] = {"seed": seed}
        for kind, run in runs.items():
            started = time.monotonic()
            policy, loss = trained(run, batches, start)
            successes = played(run, policy, options.episodes, seed)
            found[kind] = {"successes": successes, "loss": loss}
            seconds = time.monotonic() - started
            tell(f"seed {seed}, {kind}: {share(sum(successes), options.episodes)}, loss {loss:.4f}, {seconds:.0f} s")
        return found


def paired(seeds: Sequence[dict[str, Any]]) -> Comparison:
    """The second kind beside the first, on all episodes of all seeds."""
    pairs = [pair for found in seeds for pair in zip(*(found[kind]["successes"] for kind in KINDS), strict=True)]
    both, only_a, only_b = map(pairs.count, ((True, True), (True, False), (False, True)))
    return Comparison(episodes=len(pairs), left_out=0, both=both, only_a=only_a, only_b=only_b)


def summary(seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    together: dict[str, Any] = {}
    for kind in KINDS:
        successes = [succeeded for found in seeds for succeeded in found[kind]["successes"]]
        interval = wilson(sum(successes), len(successes))
        together[kind] = {"successes": sum(successes), "episodes": len(successes), "interval": interval}
    compared = paired(seeds)
    difference = dict(zip(("estimate", "low", "high"), compared.difference, strict=True))
    return {**together, "difference": difference, "p_value": compared.p_value, "verdict": compared.verdict}


def table(seeds: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'seed':8}" + "".join(f"{kind:>22}" for kind in KINDS) + "   successes, loss"]
    for found in seeds:
        cells = [f"{sum(found[kind]['successes'])}, {found[kind]['loss']:.4f}" for kind in KINDS]
        lines.append(f"{found['seed']:<8}" + "".join(f"{cell:>22}" for cell in cells))
    whole = summary(seeds)
    lines += [f"{kind:8}{share(whole[kind]['successes'], whole[kind]['episodes'])}" for kind in KINDS]
    estimate, low, high = (100 * value for value in whole["difference"].values())
    lines.append(f"changed - plain  {estimate:+.1f} points ({low:+.1f} to {high:+.1f}), p = {whole['p_value']:.2g}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--change", nargs="+", required=True, help="options of one of both, as train.moments=bf16")
    parser.add_argument("--both", nargs="+", default=[], help="options of both, as train.mode=expert")
    parser.add_argument("--start_steps", type=int, default=0, help="of the plain demo, before both")
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[1000])
    parser.add_argument("--steps", type=int, help="of each policy; the demo's when absent")
    parser.add_argument("--episodes", type=int, default=200, help="that each policy plays")
    parser.add_argument("--json", type=Path, help="where the result goes, and what is there already")
    options = parser.parse_args(argv)
    settings = {name: value for name, value in vars(options).items() if name not in ("seeds", "json")}
    before = read_json(options.json) if options.json is not None else {}
    if before and before["settings"] != settings:
        tell_error(ValueError(f"{options.json} is of {before['settings']}, not {settings}; choose another file"))
        return 2
    torch.set_num_threads(1)  # of so little, more would only wait for each other
    seeds = before.get("seeds", [])
    for seed in options.seeds:
        if seed not in [found["seed"] for found in seeds]:
            seeds.append(of_seed(seed, options))
        if options.json is not None:
            known = {"command": shlex.join(sys.orig_argv[1:]), "settings": settings}
            environment = Environment.here().model_dump(mode="json")
            write_json(options.json, {**known, "environment": environment, "summary": summary(seeds), "seeds": seeds})
    tell_text(table(seeds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
