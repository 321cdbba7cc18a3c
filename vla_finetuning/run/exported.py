"""Find the results of a finished run, and check that they are complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vla_finetuning.buckets.mirror import address, contents, pull, sizes
from vla_finetuning.files import read_foreign_json, read_json
from vla_finetuning.options.job import CONFIG_NAME, JobOptions
from vla_finetuning.options.programs import ValueConfig
from vla_finetuning.run.folder import RUN_NAME

POLICY_DIR, REPORT_NAME = "pretrained_model", "report.html"
LABELS_NAME = "labels.parquet"
WEIGHTS_NAME, PROCESSOR_NAMES = "model.safetensors", ("policy_preprocessor.json", "policy_postprocessor.json")


def result_of(config: JobOptions) -> tuple[str, Path]:
    """Return the name of the program's result, and its path."""
    if isinstance(config, ValueConfig):
        return "labels", config.folder / LABELS_NAME
    return "policy", config.folder / POLICY_DIR


def result_problem(config: JobOptions) -> str | None:
    """Return words on a missing or damaged result of a finished run, or None."""
    name, path = result_of(config)
    if name == "labels":
        return None if path.name in sizes(path.parent) else f"{address(path)} is missing"
    return policy_problem(path, list(read_json(config.folder / RUN_NAME).get("robots", ())))


def policy_problem(folder: Path, names: Sequence[str] = ()) -> str | None:
    """Return words on a missing or damaged file of the exported policies, or None. Reads no weights."""
    problems = (_problem(folder / name) for name in names or exported_robots(folder) or ("",))
    return next((problem for problem in problems if problem is not None), None)


def exported_robots(folder: Path) -> list[str]:
    """Return the robots with a policy each in `pretrained_model`; empty for one policy. Fetches no file."""
    names = contents(folder)
    return [] if CONFIG_NAME in names else [name for name in names if CONFIG_NAME in contents(folder / name)]


def _problem(folder: Path) -> str | None:
    pull(folder, at_the_top=True)
    url, stored = address(folder), sizes(folder)
    required = (CONFIG_NAME, WEIGHTS_NAME, *PROCESSOR_NAMES)
    missing = [name for name in required if name not in stored]
    if len(missing) == len(required):
        return f"{url} holds no policy"
    for name in (CONFIG_NAME, *PROCESSOR_NAMES) if not missing else ():
        try:
            content = read_foreign_json(folder / name)
            steps = () if name == CONFIG_NAME else content["steps"]
            states = [step["state_file"] for step in steps if step.get("state_file")]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{url}/{name} is damaged ({error!r})"
        missing += [state for state in states if state not in stored]
    if missing:
        return f"{url} lacks {', '.join(missing)}"
    weights = folder / WEIGHTS_NAME
    if not weights.is_file():  # in the bucket, where its header is not read
        return None if stored[WEIGHTS_NAME] else f"{url}/{WEIGHTS_NAME} is empty"
    try:
        with safe_open(weights, framework="np"):
            return None
    except (OSError, SafetensorError) as error:
        return f"{weights} is damaged ({error})"


def held_out_errors(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Return mean squared errors of action chunks on held-out frames from `evaluation.json`, by predictor.

    `mean_action` always predicts the mean of the dataset's statistics. Several robots have `ROBOT/mean_action` etc.
    """
    if "robots" in evaluation:
        by_robot = {robot: held_out_errors(evaluated) for robot, evaluated in evaluation["robots"].items()}
        return {f"{robot}/{name}": error for robot, errors in by_robot.items() for name, error in errors.items()}
    if "trained" not in evaluation:
        return {}
    trained = evaluation["trained"]
    errors = {
        "mean_action": trained["mean_action"],
        "before_training": evaluation.get("untrained", {}).get("policy"),
        "trained": trained["policy"],
        "told_another_instruction": trained["other_instruction"],
    }
    return {name: error["mse"] for name, error in errors.items() if error is not None}


def errors_by_robot(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return each robot's errors in `evaluation.json` by its name, "" for the only one. Empty without errors."""
    return evaluation.get("robots") or ({"": evaluation} if "trained" in evaluation else {})
