"""Serve a policy: robots and benchmarks send observations and receive chunks of actions.

    python serve.py --policy.path outputs/demo/pretrained_model

`openpi-client` and LeRobot's `robot_client` connect unchanged (docs/serving.md). Policies run on Ray Serve, on this
machine or a cluster; observations that arrive together are computed as a batch.
"""

from __future__ import annotations

from vla_finetuning.options.command_line import SERVE, parse_serve

if __name__ == "__main__":  # help and errors come before imports that take seconds
    from vla_finetuning.start import launch

    launch(SERVE)

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

from vla_finetuning.program import Work, run_program
from vla_finetuning.run import cluster
from vla_finetuning.serving.server import describe_service, resolve_service, serve_until_stopped
from vla_finetuning.terminal import print_safe


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stopped. Return the exit status: 0 stopped, 1 the server failed, 2 it could not start."""
    return run_program(argv, prepare)


def prepare(argv: list[str], stack: ExitStack) -> Work:
    """Resolve the policies, print the plan, and return the work."""
    service = resolve_service(parse_serve(argv))
    print_safe(*describe_service(service))

    def work() -> int:
        cluster.connect()
        asyncio.run(serve_until_stopped(service))
        return 0

    return work
