"""Record demonstrations of scripted experts as a LeRobot v3 dataset, on one laptop or a cluster.

    python record.py --env.type metaworld --env.task reach-v3,push-v3 --env.image_size=[128,128] --episodes 50 \
        --root data/reach_push
    python record.py --env.type two_bins --episodes 80 --root data/two_bins

Plays --episodes episodes of each task and keeps the successful ones. The default of the first seed (--seed) is 100000,
far from the seeds of evaluate.py. meta/environment.json holds the rendering options. Policies trained on the dataset
keep them, and evaluate.py refuses to show these policies other images.
"""

from __future__ import annotations

from vla_finetuning.options.command_line import RECORD, parse_record

if __name__ == "__main__":  # help and errors come before imports that take seconds
    from vla_finetuning.start import launch

    launch(RECORD)

from collections.abc import Sequence
from contextlib import ExitStack

from vla_finetuning.program import Work, run_program
from vla_finetuning.rollouts import experts
from vla_finetuning.run import cluster
from vla_finetuning.terminal import print_safe_text


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return the exit status: 0 done, 1 failed, 2 not started."""
    return run_program(argv, prepare)


def prepare(argv: list[str], stack: ExitStack) -> Work:
    """Resolve the recording."""
    record = experts.resolve_recording(parse_record(argv))

    def work() -> int:
        cluster.connect()
        print_safe_text(record())
        return 0

    return work
