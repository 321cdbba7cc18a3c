"""What a run left in its folder, as JSON, and the first difference between two such records."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

# Measured, or of the machine.
MEASURED = {
    *("samples_per_s", "tokens_per_s", "flops_per_s", "frames_per_s", "decoded_bytes_per_s", "mfu"),
    *("step_s", "data_wait_s", "eval_s", "checkpoint_pause_s", "spilled_bytes", "max_memory_gib"),
}


def record(folder: Path) -> dict[str, Any]:
    """Read a run's folder: lines of metrics and of row logs, checkpoints, and a digest of every tensor in any file."""
    logs, states = sorted(folder.glob("rows/*")), sorted(folder.glob("checkpoints/*/state.json"))
    evaluation, tensors = folder / "evaluation.json", sorted(folder.rglob("*.safetensors"))
    return {
        "metrics": [without_measured(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()],
        "evaluation": without_measured(json.loads(evaluation.read_text())) if evaluation.exists() else {},
        "saves": [saved(json.loads(path.read_text())) for path in states],
        "rows": {path.name: path.read_text().splitlines() for path in logs},
        # An attempt's folder in a checkpoint is no part of what was computed.
        "tensors": {
            re.sub(r"/attempt-\d+/", "/", str(path.relative_to(folder))): tensor_digests(path) for path in tensors
        },
    }


def saved(state: Mapping[str, Any]) -> dict[str, Any]:
    """Read from `state.json` how far a checkpoint is."""
    return {name: state["progress"].get(name) for name in ("step", "rows", "loss", "eval_loss")}


def without_measured(value: Any) -> Any:
    """Drop times, rates and films at any depth."""
    if isinstance(value, list):
        return [without_measured(item) for item in value]
    if not isinstance(value, dict):
        return value
    chosen = {key for key in value if key not in MEASURED and not key.endswith("_s") and key != "films"}
    return {key: without_measured(item) for key, item in value.items() if key in chosen}


def tensor_digests(path: Path) -> dict[str, str]:
    """Hash type, shape and bytes of each tensor of a safetensors file, by name. Needs no torch."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    header.pop("__metadata__", None)
    found = {}
    for name, about in sorted(header.items()):
        start, end = about["data_offsets"]
        digest = hashlib.sha256(f"{about['dtype']} {about['shape']} ".encode())
        digest.update(memoryview(data)[begin + start : begin + end])
        found[name] = digest.hexdigest()[:20]
    return found


def compare(before: Mapping[str, Any], after: Mapping[str, Any], ignored: Iterable[str] = ()) -> tuple[bool, str]:
    """Compare two records of a run: whether they are equal, and a line about it.

    A key that is new in metrics is named, and no difference. `ignored`: keys of metrics that may differ.
    """
    ignored = set(ignored)
    if "error" in before or "error" in after:
        return False, f"FAILED {'before' if 'error' in before else 'now'}: {before.get('error', after.get('error'))}"
    found = list(differences(before, after, ignored))
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return False, f"DIFFERENT: {found[0]}{more}"
    tensors = sum(len(names) for names in after["tensors"].values())
    lines, logged = len(after["metrics"]), sum(len(log) for log in after["rows"].values())
    new = {key for old, line in zip(before["metrics"], after["metrics"], strict=True) for key in line.keys() - old}
    said = (
        f"equal: {lines} lines of metrics, {len(after['saves'])} checkpoints, {tensors} tensors, {logged} lines of rows"
    )
    return True, f"{said}; new in metrics: {', '.join(sorted(new))}" if new - ignored else said


def differences(before: Mapping[str, Any], after: Mapping[str, Any], ignored: set[str]) -> Iterator[str]:
    """All differences of two records of a run, in words, the earliest step first."""
    for number, (old, new) in enumerate(itertools.zip_longest(before["metrics"], after["metrics"])):
        where = f"metrics, step {(old or new).get('step', f'of line {number}')}"
        if old is None or new is None:
            yield f"{where}: {'no' if old is None else 'a'} line before, {'none' if new is None else 'one'} now"
            continue
        for key in old:
            if key not in ignored and repr(old[key]) != repr(new.get(key)):
                yield f"{where}: {key} {old[key]!r} before, {repr(new[key]) if key in new else 'absent'} now"
    for part in ("saves", "evaluation", "rows", "tensors"):
        yield from leaves_apart(before[part], after[part], part)


def leaves_apart(old: Any, new: Any, where: str) -> Iterator[str]:
    """Where two values of JSON differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            if key not in old or key not in new:
                yield f"{where}, {key}: {'absent' if key not in old else 'there'} before, " + (
                    "absent now" if key not in new else "there now"
                )
            else:
                yield from leaves_apart(old[key], new[key], f"{where}, {key}")
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield f"{where}: {len(old)} entries before, {len(new)} now"
        for number, (one, other) in enumerate(zip(old, new, strict=False), 1):
            yield from leaves_apart(one, other, f"{where}, entry {number}")
    elif repr(old) != repr(new):
        yield f"{where}: {old!r} before, {new!r} now"
