"""Measure a policy's success rate in an environment, on one laptop or a cluster.

    python evaluate.py --policy.path outputs/demo/pretrained_model --env.type two_bins --eval.n_episodes 60 \
        --output_dir outputs/trial
    python evaluate.py --compare outputs/trial outputs/another

Flags of `lerobot-eval` keep their names. OUTPUT_DIR/episodes.jsonl has a line for every episode, and report.html shows
the results with films, failures first. The same command resumes an evaluation that was killed.
"""

from __future__ import annotations

from vla_finetuning.options.command_line import EVALUATE, parse_evaluate

if __name__ == "__main__":  # help and errors come before imports that take seconds
    from vla_finetuning.start import launch

    launch(EVALUATE)

from collections.abc import Sequence
from contextlib import ExitStack

from vla_finetuning.buckets.mirror import address, as_path
from vla_finetuning.evaluation.trial import compare_folders, record_trial, resolve_trial, run_trial
from vla_finetuning.program import Work, run_program
from vla_finetuning.run import cluster
from vla_finetuning.run.folder import claim_folder
from vla_finetuning.terminal import print_safe, print_safe_text


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return the exit status: 0 done, 1 failed or an episode ended in an error, 2 not started."""
    return run_program(argv, prepare)


def prepare(argv: list[str], stack: ExitStack) -> Work:
    """Resolve the evaluation, or compare two finished ones."""
    if argv[0] == "--compare":
        if len(argv) != 3:
            raise ValueError("--compare A B: two folders that evaluate.py has written to, and no other flags")
        text, errors = compare_folders(as_path(argv[1]), as_path(argv[2]))
        print_safe_text(text)
        return lambda: int(errors > 0)
    trial = resolve_trial(parse_evaluate(argv))
    stack.enter_context(claim_folder(trial.output_dir, lease=trial.config.lease))

    def work() -> int:
        cluster.connect()
        from vla_finetuning.report.page import write_trial_page  # not above: a comparison needs no matplotlib

        text, errors = run_trial(trial, write_trial_page)
        print_safe_text(text)
        folder = address(trial.output_dir)
        print_safe(f"Episodes     {folder}", f"Report       {folder}/report.html")
        record_trial(trial)
        return int(errors > 0)

    return work
