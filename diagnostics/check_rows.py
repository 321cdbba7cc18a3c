"""Check that a run has trained every selected frame as often as it should: once per epoch, or by its episode's weight.

    python -m diagnostics.check_rows OUTPUT_DIR

The run must have been started with `--run.record_rows`. The rows that its workers recorded up to the newest checkpoint
are compared with the dataset's metadata and the options that select frames. Exit status: 0 each row was trained as
often as due; 1 rows are missing, doubled or not selected; 2 the record cannot be read.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from vla_finetuning.buckets.mirror import address, as_path, contents, pull
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.plan.resolve import Run, resolve
from vla_finetuning.run.checkpoint import latest_checkpoint, load_progress
from vla_finetuning.run.folder import ROWS_NAME, attempts
from vla_finetuning.run.progress import recorded_rows
from vla_finetuning.terminal import print_safe, print_safe_error

Row = tuple[int, int]  # dataset_index, index


@dataclass(frozen=True)
class Epoch:
    """Rows trained up to the end of an epoch, or to the newest checkpoint within it.

    Attributes:
        skipped: number of rows that could not be read (--dataset.on_error=skip).
        whole: whether the checkpoint contains the whole epoch.
        missing, doubled: rows trained less or more often than due.
        unknown: trained rows that are not selected.
    """

    number: int
    rows: int
    trained: int
    skipped: int
    whole: bool
    missing: list[Row]
    doubled: list[Row]
    unknown: list[Row]

    @property
    def ok(self) -> bool:
        return not (self.missing or self.doubled or self.unknown)

    def __str__(self) -> str:
        text = f"epoch {self.number}: {self.trained} of {self.rows} rows trained"
        text += f", {self.skipped} skipped because they cannot be read" * (self.skipped > 0)
        wrong = {"missing": self.missing, "doubled": self.doubled, "not among those chosen": self.unknown}
        for name, rows in wrong.items():
            if rows:
                text += f"; {len(rows)} {name}, e.g. (dataset_index, index) {rows[:3]}"
        return f"{text}, as often as due" if self.ok else text


def check_rows(run: Run) -> list[Epoch]:
    """Compare the recorded rows with the plan. Raises ValueError if the run has no usable checkpoint.

    By the end of epoch n a row has been trained n times; a row of an episode with weight w about n w times
    (`plan.Repetitions`). In a mixture, a dataset that gives m of its N rows to each epoch has had each row n * m // N
    times, or once more.
    """
    folder, newest = address(run.job.output_dir), latest_checkpoint(run.job.checkpoints_dir)
    if newest is None:
        raise ValueError(f"{folder}: no checkpoint that can be used, so no row is trained for good")
    progress = load_progress(newest)
    recorded: dict[int, Counter[Row]] = defaultdict(Counter)
    skipped: Counter[int] = Counter()
    for line in recorded_rows(run.job.output_dir):
        if line["step"] <= progress.step:
            recorded[line["epoch"]].update((d, i) for d, i in line["rows"] + line["skipped"])
            skipped[line["epoch"]] += len(line["skipped"])
    plan = run.rows.source(stream=(0, run.rows.last_row)).plan
    e = plan.episodes
    episode_rows = [
        [(d, i) for i in range(start, start + length)]
        for d, start, length in zip(e.dataset_index.tolist(), e.start.tolist(), e.length.tolist(), strict=True)
    ]
    selected, counts, epochs, end = set(itertools.chain(*episode_rows)), Counter[Row](), [], 0
    while end < progress.rows:
        number, begin, end = plan.epoch_at(end)
        counts += recorded[number]
        # The record does not show which rows of an unfinished epoch are due.
        missing, doubled = [], []
        for rows, least, most in zip(episode_rows, *plan.occurrences(min(end, progress.rows)), strict=True):
            missing += [row for row in rows if counts[row] < least]
            doubled += [row for row in rows if counts[row] > most]
        unknown, whole = sorted(recorded[number].keys() - selected), end <= progress.rows
        trained = recorded[number].total() - skipped[number]
        epochs.append(Epoch(number, end - begin, trained, skipped[number], whole, missing, doubled, unknown))
    due = progress.rows - sum(epoch.trained + epoch.skipped for epoch in epochs)
    if due and all(epoch.ok for epoch in epochs):
        raise ValueError(f"{folder}: {due} rows more than recorded are in {newest.name}: were files removed?")
    return epochs


def main(argv: Sequence[str] | None = None) -> int:
    """Print the check's result and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir")
    options, flags = parser.parse_known_args(argv)  # flags of a start, as --policy.trust_remote_code
    folder = as_path(options.output_dir).absolute()
    try:
        if not contents(folder / ROWS_NAME):
            raise ValueError(f"{address(folder)}: no run with {ROWS_NAME}/ is there, which --run.record_rows records")
        pull(folder)
        run = resolve(parse_args([f"--output_dir={address(folder)}", "--resume", *flags]), gpus_found=0)
        epochs = check_rows(run)
    except (ValueError, OSError) as error:
        print_safe_error(error)
        return 2
    resumed = [line["resumed_from_step"] for line in attempts(folder)]
    print_safe(f"{address(folder)}: {len(resumed)} starts, resumed from steps {resumed}", *map(str, epochs))
    return 0 if all(epoch.ok for epoch in epochs) else 1


if __name__ == "__main__":
    sys.exit(main())
