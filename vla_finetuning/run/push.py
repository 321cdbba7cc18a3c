"""Push a run's trained policy with a model card to a repository of the Hugging Face Hub.

    python -m vla_finetuning.run.push OUTPUT_DIR [--repo_id USER/NAME] [--private] [--robot ROBOT]

pushes the policy of a finished run. Several robots are pushed to USER/NAME-ROBOT each, or one of them to USER/NAME. It
runs on the driver. `huggingface_hub` finds the token (`HF_TOKEN` or its token file); error messages never contain it.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_finetuning.buckets.mirror import address, as_path, contents, fetched, pull
from vla_finetuning.data.hub import explaining_errors
from vla_finetuning.files import read_json, read_json_lines, write_whole
from vla_finetuning.options.job import CONFIG_NAME
from vla_finetuning.options.policy import RELATIVE_PLAYED_BY, ROBOT_NAME
from vla_finetuning.run.exported import POLICY_DIR, WEIGHTS_NAME, exported_robots, held_out_errors
from vla_finetuning.run.failures import root_cause
from vla_finetuning.run.folder import EVALUATION_NAME, METRICS_NAME, RUN_NAME, evaluations
from vla_finetuning.terminal import escape_warnings, print_safe, print_safe_error

logger = logging.getLogger(__name__)

CARD_NAME, TOKENIZER_DIRS = "README.md", ("tokenizer", "action_tokenizer")
# Files of an export and the card. No other file is uploaded.
POLICY_FILES = re.compile(
    r"config\.json|model\.safetensors|README\.md|policy_(pre|post)processor\.json|\w+_step_\d+(_\w+)?\.safetensors"
    r"|environment\.json|robot\.json"
    r"|tokenizer/((tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json|(vocab|merges)\.txt"
    r"|(tokenizer|spiece)\.model|chat_template\.jinja)|action_tokenizer/(tokenizer|processor_config)\.json",
    re.ASCII,
)
# Options that are not published: paths on the user's machines, and private settings.
PRIVATE = {
    *("root", "mixture", "cache_dir", "frame_cache", "output_dir", "policy_path", "policy_options"),
    *("labels", "episode_weights", "progress_path", "env_options", "track_project", "given"),
}


def check_push(repo_id: str, private: bool | None, *, make: bool = True) -> str:
    """Check before a long run that its policy can be pushed, and return the repository's address.

    Args:
        private: whether the repository must be private; None keeps it, or takes the account's default for a new one.
        make: whether to make a missing repository; otherwise only its name is checked.
    Raises:
        ValueError: no token, no write access, an invalid name, or a public repository for a private policy.
        OSError: the Hub cannot be reached.
    """
    from huggingface_hub import HfApi, get_token

    api = HfApi()
    if not get_token():
        raise ValueError(f"model {repo_id}: no token to push with; set HF_TOKEN, or run `hf auth login`")
    with explaining_errors(repo_id, None, "model", cached=False):
        user = api.whoami()["name"]
        if not make and not api.repo_exists(repo_id):
            return f"{repo_id}, which does not exist yet: {user} makes it when the run starts"
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        try:
            api.auth_check(repo_id, write=True)
        except OSError as error:
            if getattr(getattr(error, "response", None), "status_code", None) not in (401, 403, 404):
                raise
            raise ValueError(
                f"model {repo_id}: the token of {user} may not write to it; give one with write access to it, or "
                "another --policy.repo_id"
            ) from error
        if private and not api.repo_info(repo_id).private:
            raise ValueError(
                f"model {repo_id}: exists and is public, but --policy.private=true; make it private in its settings, "
                "or give another --policy.repo_id"
            )
    return str(url)


def repositories(repo_id: str, robots: Sequence[str]) -> dict[str, str]:
    """Return the repository of each robot's policy; the key is "" for a single policy."""
    return {robot: f"{repo_id}-{robot}" if robot else repo_id for robot in robots or ("",)}


def push_policy(output_dir: Path, repo_id: str, robot: str = "") -> str:
    """Push `OUTPUT_DIR/pretrained_model`, or `robot`'s folder in it, with a model card; return the commit's address.

    Raises ValueError: the policy is missing or has a link, or the repository is missing or not accessible. OSError: the
    Hub cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    _check_pushable(output_dir, robot)
    with fetched(output_dir / POLICY_DIR / robot) as folder:
        exported_files(folder)  # refuses links before the card reads a file
        write_whole(folder / CARD_NAME, model_card(output_dir, repo_id, robot))
        files, rest = exported_files(folder)
        if rest:
            logger.warning("%s: not pushed, because no export writes it: %s", folder, ", ".join(rest))
        with explaining_errors(repo_id, None, "model", cached=False):
            added = [CommitOperationAdd(name, folder / name) for name in files]
            message = f"Policy trained by {output_dir.name}"
            return str(HfApi().create_commit(repo_id, added, commit_message=message).commit_url)


def _check_pushable(output_dir: Path, robot: str) -> None:
    """Raise ValueError if a run's folder lacks files for a push. Call it before a repository is made."""
    folder = output_dir / POLICY_DIR / robot
    pull(folder, at_the_top=True)
    files = contents(folder)
    if CONFIG_NAME not in files:
        if names := exported_robots(output_dir / POLICY_DIR):
            raise ValueError(
                f"{address(output_dir)}: no robot {robot!r} among those that were trained: {', '.join(names)}"
            )
        if robot and CONFIG_NAME in contents(output_dir / POLICY_DIR):
            raise ValueError(f"--robot {robot}: {address(output_dir)} has one policy, of no named robot; leave it out")
        raise ValueError(
            f"{address(folder)}: no trained policy is there; it is written when a run has done its last step"
        )
    if WEIGHTS_NAME not in files:
        raise ValueError(f"{address(folder)} lacks {WEIGHTS_NAME}: a policy without weights is not pushed")
    if "dataset" not in read_json(output_dir / CONFIG_NAME):
        raise ValueError(
            f"{address(output_dir)} is no run of vla.py, and has no data for a model card: write one, and push it with "
            f"`hf upload USER/NAME {address(folder)}`"
        )


def exported_files(folder: Path) -> tuple[list[str], list[str]]:
    """Return the files of an exported policy to push, and the other files. Raises ValueError for a link."""
    files, rest = [], []
    inside = [path for name in TOKENIZER_DIRS for path in sorted((folder / name).glob("*"))]
    for path in (folder, *sorted(folder.iterdir()), *inside):
        name = path.relative_to(folder).as_posix()
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            raise ValueError(
                f"{path} is a link, and links are not followed to what is published; put the file itself there, or "
                "remove the link"
            )
        if stat.S_ISREG(mode) and POLICY_FILES.fullmatch(name):
            files.append(name)
        elif name not in (".", *TOKENIZER_DIRS):
            rest.append(name)
    return files, rest


def model_card(output_dir: Path, repo_id: str, robot: str = "") -> str:
    """Return the model card of a finished run, or of one of its robots, as Markdown.

    The card has no paths or buckets: a dataset or base outside the Hub is named by the last part of its path. Texts of
    datasets are shown as code, so that they are not read as Markdown or HTML.
    """
    from huggingface_hub import ModelCard, ModelCardData

    config, facts = read_json(output_dir / CONFIG_NAME), read_json(output_dir / RUN_NAME)
    policy = read_json(output_dir / POLICY_DIR / robot / CONFIG_NAME)
    on_robot = read_json(output_dir / POLICY_DIR / robot / ROBOT_NAME)
    evaluation = read_json(output_dir / EVALUATION_NAME)
    lines = read_json_lines(output_dir / METRICS_NAME)
    # Earlier versions exported no step. After an export, the run may have gone on.
    step = on_robot.get("step", lines[-1]["step"] if lines else 0)
    scores = [
        *evaluation.get("closed_loop", {}).values(),
        *({"label": f"step {step}, {config['env_type']}"} | e for e in evaluations(output_dir) if e["step"] == step),
    ]
    if robot:
        scores, evaluation = [], evaluation.get("robots", {}).get(robot, {})
    on_hub = config["dataset"]["repo_id"]
    base = None if config["policy_type"] else facts["policy"]["base"]
    base_on_hub = facts["policy"]["revision"] is not None
    metadata = ModelCardData(
        library_name="lerobot",
        pipeline_tag="robotics",
        tags=sorted({"robotics", "lerobot", policy["type"], *(policy.get("tags") or ())}),
        license=policy.get("license"),
        datasets=[on_hub] if on_hub else None,
        base_model=base if base_on_hub else None,
    )
    card = ModelCard.from_template(
        metadata,
        template_path=str(Path(__file__).with_name("model_card.md")),
        name=_as_code(repo_id),
        repo_id=repo_id,
        type=_as_code(policy["type"]),
        robot=_as_code(robot or None),
        datasets=[
            dataset
            | {"name": _as_code(on_hub or _last_name(dataset["root"])), "robot": _as_code(dataset["robot_type"])}
            for dataset in facts["datasets"]
        ],
        revision=config["dataset"]["revision"] if on_hub else None,
        base=_as_code(base if base_on_hub else _last_name(base)) if base else None,
        base_revision=facts["policy"]["revision"],
        parameters=facts["policy"]["parameters"],
        trainable=facts["policy"]["trainable"],
        step=step,
        metrics=next((line for line in reversed(lines) if line["step"] <= step), {}),
        errors=held_out_errors(evaluation) if evaluation else {},
        frames=evaluation["trained"]["frames"] if evaluation else 0,
        scores=[{**score, "label": _as_code(score["label"])} for score in scores if score["episodes"]],
        versions=facts["versions"],
        on_robot=_on_robot(on_robot),
        options=json.dumps(_publishable(config), indent=2),
    )
    return str(card)


def _on_robot(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the card's table about the robot: what robot.json says, as code."""
    if "fps" not in facts:
        return []
    cameras = (
        f"{name} {camera['height']}x{camera['width']}" + (f" as {camera['policy']}" if "policy" in camera else "")
        for name, camera in facts["cameras"].items()
    )
    vectors = {name: value for name, value in facts.items() if name == "action" or name.startswith("observation.")}
    rows = {
        "rate": f"{facts['fps']:g} actions per second",
        **{name: ", ".join(names) for name, names in vectors.items()},
        "actions are": facts["action_kind"],
        "played by": RELATIVE_PLAYED_BY if facts["action_kind"].startswith("relative") else "",
        "cameras": ", ".join(cameras),
        "executes": f"{facts['n_action_steps']} of {facts['chunk_size']} predicted actions",
        "instructions": "; ".join(
            f"{facts['instructions_begin_with']}{text}{facts['instructions_end_with']}"
            for text in facts["instructions"][:10]
        ),
    }
    return [(label, _as_code(text) or "") for label, text in rows.items() if text]


def _publishable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` without private ones and without values that name a path or an address."""
    return {
        key: _publishable(value) if isinstance(value, Mapping) else value
        for key, value in options.items()
        if not (key in PRIVATE or _is_location(key) or _is_location(value))
    }


def _is_location(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_location, value))
    return isinstance(value, str) and ("://" in value or value.startswith(("/", "~", "@", "./", "../")))


def _as_code(text: str | None) -> str | None:
    """Return untrusted text as one line of Markdown code, safe in a table."""
    return None if text is None else f"`{' '.join(str(text).split()).replace('`', chr(39)).replace('|', '/')[:200]}`"


def _last_name(place: str) -> str:
    return place.rstrip("/").rpartition("/")[2]


def push_all(output_dir: Path, repository: Mapping[str, str]) -> int:
    """Push the trained policy of each robot to its repository. Return the exit status: 0, or 4."""
    return max((push(output_dir, repo_id, robot) for robot, repo_id in repository.items()), default=0)


def push(output_dir: Path, repo_id: str, robot: str = "") -> int:
    """Push the trained policy, and print how to retry a failed push. Return the exit status."""
    try:
        print_safe(f"Pushed       {push_policy(output_dir, repo_id, robot)}")
        return 0
    except Exception as error:  # the policy is trained, regardless of the error
        print_safe_error(root_cause(error))
        print_safe(
            f"the policy is trained; `python -m vla_finetuning.run.push {address(output_dir)}` tries again to push it",
            file=sys.stderr,
        )
        return 4


def main(argv: Sequence[str] | None = None) -> int:
    """Push a finished run's policy. Return the exit status: 0 pushed, 1 not."""
    parser = argparse.ArgumentParser(description="Push the policy of a finished run to the Hugging Face Hub.")
    parser.add_argument("output_dir", type=as_path)
    parser.add_argument("--repo_id", help="USER/NAME; the run's own --policy.repo_id when absent")
    parser.add_argument("--robot", help="of a run of several robots, the one whose policy is pushed; all when absent")
    parser.add_argument("--private", action="store_true", default=None, help="the run's own --policy.private if absent")
    args = parser.parse_args(argv)
    escape_warnings()
    try:
        pull(args.output_dir, at_the_top=True)
        config = read_json(args.output_dir / CONFIG_NAME)
        repo_id = args.repo_id or config.get("policy_repo_id")
        if repo_id is None:
            raise ValueError(f"{address(args.output_dir)}: to which repository? give --repo_id USER/NAME")
        targets = {args.robot: repo_id}
        if args.robot is None:
            targets = repositories(repo_id, exported_robots(args.output_dir / POLICY_DIR))
        for robot, repository in targets.items():
            _check_pushable(args.output_dir, robot)
            check_push(repository, args.private or config.get("policy_private"))
            print_safe(f"Pushed       {push_policy(args.output_dir, repository, robot)}")
    except (ValueError, OSError) as error:
        print_safe_error(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
