"""No module and no checkpoint runs code of others, by the source's syntax tree and by planted pickles.

tests/policies/test_remote_code.py loads hostile policies; docs/security.md lists the tests of other inputs.
"""

import ast
import hashlib
import json
import logging
import pickle
import re
from pathlib import Path

import pytest
import ray

from tests.run.test_checkpoint import empty_tensors, make_checkpoint
from vla_finetuning.run import checkpoint, cluster, manifest
from vla_finetuning.run.checkpoint import latest_checkpoint, load_checkpoint, set_aside_damaged

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    [*ROOT.glob("*.py"), *(p for part in ("vla_finetuning", "diagnostics", "ci") for p in (ROOT / part).rglob("*.py"))]
)
# Modules whose files run code when they are read; and calls that run, or may run, what they are given.
PICKLING = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
RUNNING = {"eval", "exec", "compile", "torch.load", "torch.save", "np.load", "numpy.load", "yaml.load", "os.system"}
# In flight between processes of one run, never from or to a file (training.stream.LazyPickle); and what Meta-World
# takes for a task, written and read in one process (envs.metaworld).
IN_FLIGHT = {"stream.py": {"pickle"}, "metaworld.py": {"pickle"}}
# LeRobot's client sends pickles and takes them: what it sends is read without a call (tests/serving/test_lerobot.py).
# What makes an environment travels as bytes, so that packages are imported before it is read.
IN_FLIGHT |= {"configs.py": {"pickle"}, "contract.py": {"pickle"}}
IN_FLIGHT |= {"pickles.py": {"pickle"}, "lerobot.py": {"pickle"}}
# The project's own source with a small change in it, from memory.
OWN_SOURCE = {"mutants.py": {"compile"}}


class Poison:
    """Makes a folder when it is unpickled."""

    def __init__(self, victim):
        self.victim = victim

    def __reduce__(self):
        return Path.mkdir, (self.victim,)


# Part of the text of a module that does any of this; the others are not parsed.
CALLS = "|".join(map(re.escape, RUNNING))
SUSPICIOUS = re.compile(rf"{'|'.join(PICKLING)}|trust_remote_code=|allow_pickle=|shell=|(?<![\w.])({CALLS})\(")


def dangerous(path):
    """Return a module's imports, calls and keywords that can run code."""
    imported, called, keywords = set(), set(), set()
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if SUSPICIOUS.search(text) else ():
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Call):
            called.add(ast.unparse(node.func))
            keywords |= {f"{keyword.arg}={ast.unparse(keyword.value)}" for keyword in node.keywords}
    allowing = {word for word in keywords if word.startswith(("trust_remote_code=", "allow_pickle=", "shell="))}
    allowing = {word for word in allowing if not word.endswith("=False")}
    return imported & PICKLING, (called & RUNNING) | allowing


def test_no_module_uses_unsafe_serialization_or_eval():
    actual = {path: dangerous(path) for path in SOURCES}
    expected = {path: (IN_FLIGHT.get(path.name, set()), OWN_SOURCE.get(path.name, set())) for path in SOURCES}
    assert actual == expected and actual[ROOT / "vla_finetuning/training/stream.py"][0]  # else nothing was searched


@pytest.mark.parametrize("name", ["attempt-00000/trainable.safetensors", checkpoint.STATE])
@pytest.mark.parametrize("knows_checksums", [False, True])
def test_pickled_checkpoint_files_are_refused_without_execution(tmp_path, name, knows_checksums):
    """Also with matching checksums."""
    victim, folder = tmp_path / "victim", make_checkpoint(tmp_path / "checkpoints")
    (folder / name).write_bytes(pickle.dumps(Poison(victim)))
    if knows_checksums and name != checkpoint.STATE:
        state = json.loads((folder / checkpoint.STATE).read_text())
        data = (folder / name).read_bytes()
        state["files"][Path(name).name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        del state["sha256"]
        checkpoint.write_json(folder / checkpoint.STATE, {**state, "sha256": manifest._digest(state)})
        assert latest_checkpoint(folder.parent) == folder
    with pytest.raises(ValueError, match=str(folder)):
        load_checkpoint(folder, *empty_tensors())
    set_aside_damaged(folder.parent)
    assert not victim.exists()
    pickle.loads((next(tmp_path.rglob(Path(name).name))).read_bytes())
    assert victim.exists()  # it is poison


def test_ray_starts_without_dashboard_and_with_token(monkeypatch):
    """Ray 2.60 asks for a token by default; its dashboard opens on loopback (ci/smoke_job.sh)."""
    started = []
    monkeypatch.setattr(ray, "is_initialized", lambda: bool(started))
    monkeypatch.setattr(ray, "init", lambda **options: started.append(options))
    monkeypatch.setattr(cluster, "running_cluster", lambda: None)
    cluster.connect()
    assert [options["include_dashboard"] for options in started] == [False]
    # That the token is on is Ray's default, and not the user's business.
    notice = logging.getLogger("ray._private.authentication.authentication_token_setup")
    assert not notice.isEnabledFor(logging.WARNING)
    assert not [path for path in SOURCES if "RAY_AUTH_MODE" in path.read_text()]
    assert "--dashboard-host 127.0.0.1" in (ROOT / "ci" / "smoke_job.sh").read_text()
