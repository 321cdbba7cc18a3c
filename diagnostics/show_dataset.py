"""Look at any LeRobot v3 dataset before training on it: one self-contained page, and warnings on the terminal.

    python -m diagnostics.show_dataset ROOT [--output FILE]
    python -m diagnostics.show_dataset --repo_id USER/NAME [--revision R] [--output FILE]

The page shows every camera at a few moments of an episode, state and action curves, how long the episodes are, what
they are told to do, and the ranges that a policy's input is normalised by. It warns of what training would suffer from;
`report/dataset_look.py` says what is looked for, and how much of a large dataset is read. Exit status: 0, with warnings
too; 2 when there is no such dataset or it cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vla_finetuning.data.metadata import fetch_dataset, load_metadata
from vla_finetuning.report.dataset_look import look_at
from vla_finetuning.report.page import write_dataset_page
from vla_finetuning.terminal import escape_warnings, tell, tell_error


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("root", nargs="?", help="a local folder, s3://, gs://")
    which.add_argument("--repo_id", help="a dataset on the Hugging Face Hub, which is downloaded")
    parser.add_argument("--revision", help="of the dataset on the Hub (default: as of now)")
    parser.add_argument("--output", type=Path, default=Path("dataset.html"), help="the page (default: %(default)s)")
    options = parser.parse_args(argv)
    escape_warnings()
    try:
        root = fetch_dataset(options.repo_id, options.revision)[0] if options.repo_id else options.root
        look = look_at(load_metadata(root))
        page = write_dataset_page(look, options.output)
    except (ValueError, OSError) as error:
        tell_error(error)
        return 2
    for finding in look.findings:
        tell(f"warning [{finding.kind}] {finding.text}")
    tell(f"{len(look.findings) or 'no'} warning{'s' * (len(look.findings) != 1)}; looked at {look.sample}")
    tell(str(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
