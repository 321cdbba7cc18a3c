"""Inspect a LeRobot dataset before training: write a self-contained page, and print warnings.

    python -m diagnostics.show_dataset ROOT [--output FILE]
    python -m diagnostics.show_dataset --repo_id USER/NAME [--revision R] [--output FILE]
    python -m diagnostics.show_dataset ROOT --scores scores.jsonl --exclude_to bad_episodes.json
    python -m diagnostics.show_dataset @mix.yaml
    python -m diagnostics.show_dataset ROOT --recap.labels out/value/labels.parquet
    python -m diagnostics.show_dataset ROOT --train.action_tokenizer physical-intelligence/fast --policy.chunk_size 50

The page shows camera frames, state and action curves, episode lengths, instructions and the ranges of normalisation.
`report/dataset_look.py` lists the warnings, `report/episode_scores.py` the reasons to look at an episode. --skip_idle
and --episode_weights print the effect of the flags of --dataset. with these names. --train.action_tokenizer (`fit`, a
folder or a Hub id) prints the tokens per chunk of actions and the error of decoding. A mixture's file (docs/robots.md)
prints its datasets side by side, with their mismatches. Exit status: 0, also with warnings; 2 it cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vla_finetuning.buckets.mirror import as_file
from vla_finetuning.data.dataset import known_episodes
from vla_finetuning.data.dataset_files import fetch_dataset
from vla_finetuning.data.episode_weights import episode_weights
from vla_finetuning.data.frames import describe_weights, frame_ranges_of, movement_keys, table
from vla_finetuning.data.metadata import DatasetMetadata, load_metadata
from vla_finetuning.files import write_json
from vla_finetuning.options.mixture import read_mixture
from vla_finetuning.options.programs import Config
from vla_finetuning.plan import look as run_look
from vla_finetuning.plan.labels import show_labels
from vla_finetuning.plan.mixture_look import describe_texts, look_at_mixture
from vla_finetuning.plan.names import with_names
from vla_finetuning.report.augmented_frames import augmented
from vla_finetuning.report.dataset_look import look_at
from vla_finetuning.report.episode_scores import score_episodes
from vla_finetuning.report.page import write_dataset_page
from vla_finetuning.terminal import escape_warnings, escaped, print_safe, print_safe_error
from vla_finetuning.training.chunks import describe_tokens_of

# A run's options for each --augmentation.
AUGMENTATIONS: dict[str, dict[str, Any]] = {
    "openpi": {"train": {"augmentation": "openpi"}},
    "lerobot": {"dataset": {"image_transforms": {"enable": True}}},
}


def describe_selection(meta: DatasetMetadata, skip_idle: float | None, weights: str | None) -> list[str]:
    """Return lines on the frames that a run with these options would leave out or repeat; none without options."""
    if skip_idle is None and weights is None:
        return []
    if skip_idle is not None and not skip_idle > 0:
        raise ValueError(f"--skip_idle={skip_idle}: must be positive, in seconds")
    weight = None if weights is None else episode_weights([meta], [meta.root], weights)[0]
    keys, everything = movement_keys(meta), known_episodes(meta)
    ranges = frame_ranges_of(meta, everything, keys=keys, skip_idle=skip_idle, weight=weight)
    return [*([] if weight is None else [describe_weights(weight)]), *table(meta, everything, ranges)]


def show_mixture(file: str, rename_map: dict[str, str]) -> None:
    """Print the datasets of a mixture side by side, and their mismatches."""
    config = Config(rename_map=rename_map)
    config.dataset.mixture = read_mixture(file)
    tables, misfits = look_at_mixture(config)
    print_safe(*tables)
    print_safe(*(f"does not fit: {misfit}" for misfit in misfits))
    print_safe(f"{len(misfits) or 'no'} misfit{'s' * (len(misfits) != 1)}")


def show_dataset(options: argparse.Namespace) -> None:
    """Write the page of a dataset and the files of its scores, and print warnings."""
    root = fetch_dataset(options.repo_id, options.revision)[0] if options.repo_id else options.root
    meta = load_metadata(root)
    if options.rename_map or options.state_features:
        state = options.state_features.split(",") if options.state_features else []
        (meta,) = with_names([meta], options.rename_map, state)
    look, scores = look_at(meta, lambda *sample: run_look.look_at(*sample).problems), None
    if options.augmentation:
        look = replace(look, sheet=augmented(look.sheet, AUGMENTATIONS[options.augmentation]))
    selection = describe_selection(meta, options.skip_idle, options.episode_weights)  # fails before the slow scoring
    dotted = vars(options)
    tokenizer, file = dotted["train.action_tokenizer"], dotted["recap.labels"]
    tokens = describe_tokens_of(meta, tokenizer, dotted["policy.chunk_size"]) if tokenizer else []
    labels = None if file is None else show_labels(file, meta)
    for path in filter(None, (options.output, options.scores, options.exclude_to)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if options.scores or options.exclude_to:
        known = known_episodes(meta).tolist()
        scores = list(score_episodes(meta, tqdm(known, unit="episode", disable=not sys.stderr.isatty())))
        if options.scores:
            options.scores.write_text("".join(json.dumps(asdict(score)) + "\n" for score in scores))
        if options.exclude_to:
            write_json(options.exclude_to, [score.episode for score in scores if score.reasons])
    write_dataset_page(look, options.output, scores, selection, labels)
    print_safe(*(f"warning [{finding.kind}] {finding.text}" for finding in look.findings))
    print_safe(*(f"episode {score.episode}: {'; '.join(score.reasons)}" for score in scores or [] if score.reasons))
    print_safe(*selection, *tokens, *map(escaped, labels[0] if labels is not None else ()))
    print_safe(f"{len(look.findings) or 'no'} warning{'s' * (len(look.findings) != 1)}; looked at {look.sample}")
    texts = [describe_texts(meta)] if "action" not in meta.features and meta.text_keys else []
    print_safe(*look.shares, *texts, *(f"not read: {what}" for what in meta.not_read), str(options.output))


def main(argv: Sequence[str] | None = None) -> int:
    """Show the dataset or mixture that the flags name, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("root", nargs="?", help="a local folder, s3://, gs:// or az://; @FILE: a mixture")
    which.add_argument("--repo_id", help="a dataset on the Hugging Face Hub, which is downloaded")
    parser.add_argument("--revision", help="of the dataset on the Hub (default: the tag v3.0, else the default branch)")
    parser.add_argument("--rename_map", type=json.loads, default={}, help="names of features, as a run's --rename_map")
    parser.add_argument("--state_features", help="features that are the state, as a run's --dataset.state_features")
    parser.add_argument("--output", type=Path, default=Path("dataset.html"), help="the page (default: %(default)s)")
    parser.add_argument("--scores", type=Path, help="score every episode; a JSON line each into this file")
    parser.add_argument("--exclude_to", type=Path, help="score, and write the list of the episodes that look bad")
    parser.add_argument("--augmentation", choices=AUGMENTATIONS, help="show what training would make of frames")
    parser.add_argument("--skip_idle", type=float, help="say what --dataset.skip_idle of so many seconds leaves out")
    parser.add_argument("--episode_weights", help="say what --dataset.episode_weights, a column or @FILE, makes of it")
    parser.add_argument("--recap.labels", type=as_file, help="show how the labels of value.py fell")
    parser.add_argument("--train.action_tokenizer", help="say what tokens it makes of actions")
    parser.add_argument("--policy.chunk_size", type=int, default=50, help="of chunks of actions")
    options = parser.parse_args(argv)
    escape_warnings()
    is_mixture = (options.root or "").startswith("@")
    changed = [name for name, value in vars(options).items() if value != parser.get_default(name)]
    if is_mixture and (refused := [name for name in changed if name not in ("root", "rename_map")]):
        flags = ", ".join(f"--{name}" for name in refused)
        parser.error(f"{flags}: of a mixture only the datasets beside each other are shown; give one of them alone")
    if options.revision and not options.repo_id:
        parser.error(f"--revision={options.revision}: of a dataset on the Hub; give --repo_id")
    try:
        if is_mixture:
            show_mixture(options.root.removeprefix("@"), options.rename_map)
        else:
            show_dataset(options)
    except (ValueError, OSError) as error:
        print_safe_error(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
