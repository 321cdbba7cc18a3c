"""Write a run's `report.html` and the page about a dataset, each a self-contained file that needs no network.

    python -m vla_finetuning.report.page OUTPUT_DIR

writes the report of a run of `vla.py`, `value.py` or `grpo.py` again from its folder. Sections whose files are missing
are left out, and the page says so. Pages are rendered from `templates/` with everything escaped, because instructions,
names and paths are untrusted.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from vla_finetuning.buckets.mirror import address, as_path, pull, synced
from vla_finetuning.buckets.store import StorageError
from vla_finetuning.data.metadata import dimension_names, join_features, load_metadata, rename_features
from vla_finetuning.data.plan import evenly_spaced
from vla_finetuning.data.relative_actions import ACTION
from vla_finetuning.files import read_json, read_json_lines, write_whole
from vla_finetuning.options.job import CONFIG_NAME
from vla_finetuning.report import figures
from vla_finetuning.report.augmented_frames import augmented
from vla_finetuning.report.charts import metric_charts
from vla_finetuning.report.dataset_look import OUTLIER, Look, look_at, scaled_ranges
from vla_finetuning.report.episode_scores import Score
from vla_finetuning.report.figures import Chunk, plain
from vla_finetuning.report.loop import closed_loop, over_latency, score_row, shown_films
from vla_finetuning.report.values import advantages_chart, values_section
from vla_finetuning.run.checkpoint import checkpoints
from vla_finetuning.run.exported import REPORT_NAME, errors_by_robot
from vla_finetuning.run.folder import EVALUATION_NAME, METRICS_NAME, RUN_NAME, attempts, skipped_episodes
from vla_finetuning.run.polling import polling
from vla_finetuning.terminal import escape_warnings, print_safe, print_safe_error

POLL_S = 2.0
# Limits that keep a page readable and small.
MAX_DIMENSIONS, STRIPS_PER_FIGURE, EXAMPLES, TABLE_ROWS, MAX_DATASETS = 32, 8, 3, 20, 4

logger = logging.getLogger(__name__)
# Lines of metrics.jsonl.
Lines = Sequence[Mapping[str, Any]]
# The template's values for a dataset, or a sentence in place of them.
Drawn = dict[str, Any] | str


# ---- writing pages ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def keep_report(output_dir: Path) -> Iterator[None]:
    """Write the report when the block starts, at each new checkpoint, and when the block ends or raises.

    Runs on the driver, in a thread, so that no training process waits. A report that cannot be written is a warning.
    """
    looks: list[Drawn] | None = None
    written_for: int | str | None = "nothing yet"

    def write() -> None:
        nonlocal looks
        try:
            looks = look_at_datasets(output_dir) if looks is None else looks
            write_report(output_dir, looks)
        except Exception as error:
            logger.warning("%s could not be written: %r", address(output_dir / REPORT_NAME), error)

    def write_if_new() -> None:
        nonlocal written_for
        newest = written_for
        with contextlib.suppress(StorageError):
            newest = max(checkpoints(output_dir / "checkpoints"), default=None)
        if newest != written_for:
            write()
            written_for = newest

    try:
        with polling(write_if_new, POLL_S):
            yield
    finally:
        write()


def write_report(output_dir: Path, looks: Sequence[Drawn] | None = None) -> Path:
    """Write `OUTPUT_DIR/report.html` atomically from the run's files; `looks` reuses a result of `look_at_datasets`."""
    pull(output_dir)
    page = render_report(output_dir, look_at_datasets(output_dir) if looks is None else looks)
    write_whole(output_dir / REPORT_NAME, page)
    return output_dir / REPORT_NAME


def write_dataset_page(
    look: Look,
    path: Path,
    scores: Sequence[Score] | None = None,
    selection: Sequence[str] = (),
    labels: tuple[Sequence[str], np.ndarray, np.ndarray] | None = None,
) -> None:
    """Write the page about one dataset, with its episodes whose `scores` have reasons.

    `selection` are lines about episodes that a run would leave out or repeat, `labels` is the result of `show_labels`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    suspects = None if scores is None else sorted((s for s in scores if s.reasons), key=lambda s: -len(s.reasons))
    page = page_template("dataset.html").render(
        title=plain(look.meta.root, 200),
        looks=[_draw_look(look)],
        suspects=suspects,
        scored=len(scores or ()),
        selection="\n".join(selection),
        labels=None if labels is None else {"table": "\n".join(labels[0]), "svg": advantages_chart(*labels[1:])},
    )
    write_whole(path, page)


def write_trial_page(
    folder: Path,
    about: Mapping[str, Any],
    by_latency: Mapping[float | None, Sequence[Mapping[str, Any]]],
    films: Sequence[Mapping[str, Any]],
) -> None:
    """Write `report.html` of a closed-loop evaluation.

    Args:
        about: policy, environment and seed, as in `evaluated.json`.
        by_latency: scores of each latency in seconds, the first over all episodes; the key is None without latency.
        films: as `rollouts.replay.make_films` returns them.
    """
    policy, env = about["policy"], about["environment"]
    facts = [
        ("Policy", plain(policy["path"], 300)),
        ("Environment", plain(" ".join([env["type"], *env["options"]]), 300)),
        ("Seed", str(about["seed"])),
    ]
    facts += [("Controller", plain(policy["controller"]))] if "controller" in policy else []
    latencies = [f"{latency_s:g} s" for latency_s in by_latency if latency_s is not None]
    facts += [("Latency", ", ".join(latencies))] if latencies else []
    rows = [
        {**row, "label": f"{latency_s:g} s, {row['label']}"} if len(latencies) > 1 else row
        for latency_s, rows in by_latency.items()
        for row in rows
    ]
    page = page_template("trial.html").render(
        title=folder.name,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        facts=facts,
        scores=[score_row(row) for row in rows],
        at_latency=f", at a latency of {latencies[0]}" if latencies else "",
        over_latency=over_latency(by_latency) if len(latencies) > 1 else None,
        films=shown_films(films, folder),
    )
    write_whole(folder / REPORT_NAME, page)


def look_at_datasets(output_dir: Path) -> list[Drawn]:
    """Return the template's values for each dataset of a run, or the reason why it cannot be read."""
    facts, config = read_json(output_dir / RUN_NAME), read_json(output_dir / CONFIG_NAME)
    looks: list[Drawn] = []
    for dataset in facts.get("datasets", [])[:MAX_DATASETS]:
        try:
            meta = load_metadata(dataset["root"])
            names = dataset.get("renamed", {})
            for name, keys in names.items():
                meta = join_features(meta, keys, name) if len(keys) > 1 else meta
            single = {keys[0]: name for name, keys in names.items() if len(keys) == 1}
            loaded = {feature.key for name, feature in meta.features.items() if name != feature.key}  # as `subtask`
            meta = rename_features(meta, {key: name for key, name in single.items() if key not in loaded})
            look = look_at(meta)
            looks.append(_draw_look(replace(look, sheet=augmented(look.sheet, config))))
        except (ValueError, OSError) as error:
            looks.append(f"The dataset could not be looked at: {error}")
    if hidden := len(facts.get("datasets", [])[MAX_DATASETS:]):
        looks.append(f"{hidden} more datasets are not shown; python -m diagnostics.show_dataset ROOT shows one")
    return looks


# ---- the report -------------------------------------------------------------------------------------------------


def render_report(output_dir: Path, looks: Sequence[Drawn]) -> str:
    config = read_json(output_dir / CONFIG_NAME)
    facts = read_json(output_dir / RUN_NAME)
    lines = read_json_lines(output_dir / METRICS_NAME)
    evaluation = read_json(output_dir / EVALUATION_NAME)
    starts = attempts(output_dir)
    total = facts.get("steps") or config.get("steps")
    done = lines[-1]["step"] if lines else 0
    return page_template("report.html").render(
        title=output_dir.name,
        subtitle=_subtitle(done, total),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        key_figures=_key_figures(lines, evaluation, done, total),
        facts=_facts(config, facts, lines),
        # The chart of the closed loop shows the intervals of held-out success.
        charts=metric_charts(
            [{key: v for key, v in line.items() if not key.startswith("held_out_interval")} for line in lines],
            [attempt["resumed_from_step"] for attempt in starts[1:]],
        ),
        held_out=list(_held_out(evaluation, facts)),
        closed_loop=closed_loop(evaluation, output_dir, lines),
        has_datasets="grpo" not in config,
        has_held_out=config.keys().isdisjoint(("grpo", "value")),  # only vla.py measures the open-loop error
        values=values_section(output_dir),
        held_out_expected=bool((config.get("dataset") or {}).get("eval_split")),
        attempts=starts,
        skipped=_skipped(output_dir),
        looks=looks,
        plan=facts.get("plan"),
        config=json.dumps(config, indent=2) if config else None,
    )


def _subtitle(done: int, total: int | None) -> str:
    if not done:
        return "No step has been logged yet."
    if total is None:
        return f"{done:,} steps done."
    return f"All {total:,} steps done." if done >= total else f"Step {done:,} of {total:,}."


def _key_figures(lines: Lines, evaluation: Mapping[str, Any], done: int, total: int | None) -> list[tuple[str, str]]:
    entries = [(f"of {total:,} steps" if total else "steps", f"{done:,}")]
    if losses := [line["loss"] for line in lines if line.get("loss") is not None]:
        entries.append(("loss", _number(losses[-1])))
    for robot, errors in errors_by_robot(evaluation).items():
        trained, whose = errors["trained"], f", {robot}" if robot else ""
        if baseline := trained["mean_action"]["mse"]:
            entries.append((f"of the mean action's error{whose}", f"{trained['policy']['mse'] / baseline:.2f} ×"))
    for name, tried in evaluation.get("closed_loop", {}).items():
        robot, _, condition = name.rpartition("/")
        if condition in ("trained", "after") and tried["episodes"]:
            whose = f", {robot}" if robot else ""
            unknown = f", {tried['errors']} not played to the end" if tried.get("errors") else ""
            entries += [
                (f"success in the loop{when}{whose}{unknown}", f"{tried[key] / tried['episodes']:.0%}")
                for key, when in (("successes", ""), ("successes_at_end", " at the end"))
            ]
    if totals := _totals(lines):
        seconds, samples, waited = totals
        entries += [("samples / s", _number(samples / seconds, 3)), ("waiting for data", f"{waited / seconds:.0%}")]
    return entries


def _facts(config: Mapping[str, Any], facts: Mapping[str, Any], lines: Lines) -> list[tuple[str, str]]:
    """Return hardware, versions and time of a run as (name, value)."""
    entries, workers = [], (config.get("scaling") or {}).get("num_workers", 0)
    if hardware := facts.get("hardware"):
        device = "GPU" if facts["use_gpu"] else "CPU"
        gpus = f", {hardware['gpus']:g} GPUs ({', '.join(hardware['gpu_types'])})" if hardware["gpus"] else ""
        nodes = f"{hardware['nodes']} node{'s' * (hardware['nodes'] != 1)}"
        cluster = f"cluster of {nodes}: {hardware['cpus']:g} CPUs{gpus}"
        memory = f"{hardware['memory_bytes'] / 2**30:.3g} GiB of memory"
        entries.append(("Hardware", f"{workers} {device} workers; {cluster}, {memory}"))
    if versions := facts.get("versions"):
        text = ", ".join(f"{name} {version}" for name, version in versions.items())
        entries.append(("Versions", re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28,}", r"\1", text)))
    if totals := _totals(lines):
        seconds, samples, _ = totals
        entries.append(("Time", f"{_duration(seconds)} in training steps, {samples:,} samples"))
    return entries


def _totals(lines: Lines) -> tuple[float, int, float] | None:
    """Return the logged seconds of steps, the number of samples, and the seconds of waiting for data, if logged."""
    logged = [line for line in lines if "samples" in line]
    if not logged:
        return None
    steps = np.diff([line["step"] for line in logged], prepend=0)
    seconds, waited = (float(np.dot([line[key] for line in logged], steps)) for key in ("step_s", "data_wait_s"))
    return seconds, logged[-1]["samples"], waited


def _held_out(evaluation: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each robot's held-out errors (total, by task, by dimension) and a few predicted chunks."""
    for robot, errors in errors_by_robot(evaluation).items():
        about = (facts.get("robots") or {}).get(robot, facts)
        trained, untrained = errors["trained"], errors.get("untrained") or {}
        baseline, size = trained["mean_action"]["mse"], len(trained["policy"]["mae"])
        names = about.get("action_names") or []
        names = names if len(names) == size else [f"{ACTION}[{i}]" for i in range(size)]

        def mse(error: Mapping[str, Any], baseline: float = baseline) -> tuple[str, str]:
            return _number(error["mse"]), _number(error["mse"] / baseline, 3) if baseline else "–"

        named = {"mean action": trained["mean_action"], "before training": untrained.get("policy")}
        named |= {"trained": trained["policy"], "trained, with another instruction": trained["other_instruction"]}
        by_task = [(task, e) for task, e in trained.get("by_task", {}).items() if e["policy"] is not None]
        by_task.sort(key=lambda item: -item[1]["policy"]["mse"])
        worst = by_task[0][1]["policy"]["mse"] if by_task else 0.0
        mae = zip(names, trained["policy"]["mae"], trained["mean_action"]["mae"], strict=True)
        yield (
            robot,
            {
                "frames": trained["frames"],
                "errors": [(name, *mse(error)) for name, error in named.items() if error is not None],
                "by_task": [
                    (task, e["frames"], *mse(e["policy"]), _bar(e["policy"]["mse"], worst))
                    for task, e in by_task[:TABLE_ROWS]
                ],
                "tasks": len(by_task),
                "by_dimension": [
                    (figures.with_unit(name), _number(policy, 3), _number(mean, 3)) for name, policy, mean in mae
                ],
                "chunks": _chunk_figures(trained.get("examples", []), names, about.get("actions_per_s")),
            },
        )


def _chunk_figures(examples: list[dict[str, Any]], names: list[str], rate: float | None) -> list[dict[str, str]]:
    if not examples or rate is None:
        return []
    chosen = [examples[i] for i in evenly_spaced(len(examples), EXAMPLES)]
    chunks = [figures.example_chunk(example) for example in chosen]

    def draw(part: slice) -> figures.Figure:
        some = [Chunk(c.title, c.recorded[:, part], c.predicted[:, part]) for c in chunks]
        return figures.chunk_strips(some, names[part], rate)

    charts = _in_parts("Recorded and predicted", "Predicted and recorded actions of", names, draw)
    charts[0]["instructions"] = "; ".join(dict.fromkeys(f"“{plain(e['task'])}”" for e in chosen))
    return charts


def _in_parts(
    title: str, label: str, names: Sequence[str], draw: Callable[[slice], figures.Figure]
) -> list[dict[str, str]]:
    """Draw STRIPS_PER_FIGURE dimensions per figure, at most MAX_DIMENSIONS in all."""
    charts, count = [], len(names)
    for first in range(0, min(count, MAX_DIMENSIONS), STRIPS_PER_FIGURE):
        part = slice(first, min(first + STRIPS_PER_FIGURE, MAX_DIMENSIONS))
        span = f" ({first + 1} to {min(part.stop, count)} of {count})" if count > STRIPS_PER_FIGURE else ""
        svg = figures.to_svg(draw(part), f"{label} {', '.join(names[part])}")
        charts.append({"title": title + span, "svg": svg})
    return charts


def _skipped(output_dir: Path) -> dict[str, Any] | None:
    """Return a table of rows that could not be read, or None if there are none."""
    lines = skipped_episodes(output_dir)
    if not lines:
        return None
    keys = list(dict.fromkeys(key for line in lines for key in line))
    rows = [[plain(line.get(key, ""), 200) for key in keys] for line in lines[:TABLE_ROWS]]
    return {"count": len(lines), "keys": keys, "rows": rows}


# ---- a dataset --------------------------------------------------------------------------------------------------


def _draw_look(look: Look) -> dict[str, Any]:
    meta = look.meta
    lengths_s = meta.episode_length[meta.episode_length > 0] / meta.fps
    curves = []
    for key, values in look.curves.items():
        names, label = dimension_names(meta, key), f"{key} over time in episode {look.shown}:"

        def draw(part: slice, values: np.ndarray = values, names: Sequence[str] = names) -> figures.Figure:
            return figures.strips(look.time_s, values[:, part], names[part])

        curves += _in_parts(plain(key), label, names, draw)
    ranges = {}
    for key, dims in look.ranges.items():
        scaled = scaled_ranges(dims[:MAX_DIMENSIONS])
        if np.isfinite(scaled).all(axis=1).any():
            chart = figures.ranges(scaled, [r.name for r in dims[:MAX_DIMENSIONS]], limit=OUTLIER)
            ranges[key] = figures.to_svg(chart, f"Normalisation ranges of {key}; the table has the numbers")
    histogram = figures.histogram(lengths_s, xlabel="length of the episode / s", ylabel="episodes")
    label = (
        f"Histogram of episode lengths: {meta.total_episodes} episodes from {_number(lengths_s.min())} to "
        f"{_number(lengths_s.max())} s, half of them longer than {_number(float(np.median(lengths_s)))} s"
    )
    return {
        "look": replace(look, sheet=[], curves={}),  # frees the images, since a run holds the look to its end
        "augmented": any(moment.is_augmented for moment in look.sheet),
        "images": {
            key: [
                {"uri": figures.to_data_uri(moment.images[key]), "time": f"{moment.time_s:.1f} s"}
                for moment in look.sheet
                if key in moment.images
            ]
            for key in meta.camera_keys
        },
        "curves": curves,
        "lengths": figures.to_svg(histogram, label),
        "ranges": ranges,
    }


# ---- numbers, templates -----------------------------------------------------------------------------------------


def _number(value: float, digits: int = 4) -> str:
    """Format a number with `digits` significant digits and thousands separators: 0.01235, 1,234."""
    if not math.isfinite(value):
        return "–"
    if abs(value) >= 10**digits and abs(value) < 1e12:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


def _bar(value: float, most: float) -> int:
    return round(100 * min(value / most, 1)) if most else 0


def page_template(name: str) -> Any:
    folder = Path(__file__).parent / "templates"
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (folder / "page.css").read_text(encoding="utf-8")
    environment.filters |= {"plain": plain, "number": _number, "duration": _duration, "bar": _bar}
    environment.globals |= {"style": style, "content_policy": _content_policy(style)}
    environment.globals |= {"most_rows": TABLE_ROWS, "most_dimensions": MAX_DIMENSIONS, "outlier": OUTLIER}
    return environment.get_template(name)


def _content_policy(style: str) -> str:
    """Return a content security policy: no scripts, nothing fetched, only the page's own style sheet.

    It limits the harm of untrusted text that is not escaped. Figures have their colours in style attributes;
    `style-src` is for browsers that do not distinguish these from style sheets.
    """
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return "; ".join(
        (
            "default-src 'none'",
            "img-src data:",
            f"style-src-elem 'sha256-{digest}'",
            "style-src-attr 'unsafe-inline'",
            "style-src 'unsafe-inline'",
            "base-uri 'none'; form-action 'none'",
        )
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write a run's page again. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", type=as_path, help="a run's folder")
    folder = parser.parse_args(argv).output_dir
    escape_warnings()
    try:
        pull(folder)
        if not (folder / CONFIG_NAME).is_file():
            raise ValueError(f"{address(folder)} holds no run: {CONFIG_NAME} is missing; give a run's --output_dir")
        with synced(folder):
            print_safe(address(write_report(folder)))
    except (ValueError, OSError) as error:
        print_safe_error(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
