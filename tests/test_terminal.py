"""Names from data sets cannot steer a terminal, nor add or reverse a line of the plan or a log."""

import ast
import json
import logging
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vla
from diagnostics import show_dataset
from tests.datasets import make_dataset
from tests.test_trust import ROOT, SOURCES
from tests.tiny import make_base
from vla_finetuning import terminal
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.run import failures, progress

# Clears the screen, writes over the line, begins another, turns text around, and the first as one character (C1).
HOSTILE = "arm\x1b[2J\rPolicy       trusted\nPolicy       trusted\u202edetsurt\x9b2J\u2028x\x85y\ud800"
SHOWN = r"arm\x1b[2J\rPolicy       trusted\nPolicy       trusted\u202edetsurt\x9b2J\u2028x\x85y\ud800"
# Of an error's or a log's lines only the first begins where lines begin.
APART = SHOWN.replace(r"\n", "\n    ")
PATH = HOSTILE.replace("\ud800", "")


@settings(max_examples=25)
@given(st.text() | st.text(alphabet="\x1b\r\n\t\x9b\u202e\u2066\u200b\\xa \u00e9"))
def test_escaped_text_is_printable_and_stable(text):
    shown = terminal.escaped(text)
    assert shown.isprintable() and terminal.escaped(shown) == shown
    assert (shown == text) == text.isprintable()


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Flags of a run on a dataset with hostile names, and of one on the same with plain ones."""
    folder = tmp_path_factory.mktemp("terminal")
    flags = []
    for kind, name in (("plain", "arm"), ("hostile", PATH)):
        root = folder / kind
        cameras = {"observation.images.top": (16, 16)}
        make_dataset(root, episodes=(6, 5), cameras={}, image_cameras=cameras, tasks=(name, f"lift {name}"))
        info = json.loads((root / "meta" / "info.json").read_text())
        (root / "meta" / "info.json").write_text(json.dumps({**info, "robot_type": name}))
        meta = load_metadata(root)
        base = make_base(folder / f"{kind} base", meta, chunk_size=8)
        (folder / f"{kind}s").mkdir()
        root = root.rename(folder / f"{kind}s" / name)
        flags.append([f"--dataset.root={root}", f"--policy.path={base}", f"--output_dir={folder / kind / name}"])
    return flags


def assert_shown(text, *parts):
    """Check that all lines are printable and that the escaped parts are among them."""
    assert all(line.isprintable() for line in text.removesuffix("\n").split("\n")), text
    assert all(part in text for part in parts), text


def test_hostile_names_are_escaped_in_the_plan(setting, capsys):
    plain, hostile = ([*flags, "--batch_size=2", "--steps=2", "--dry_run"] for flags in setting)
    assert vla.main(plain) == 0
    expected = capsys.readouterr().out
    assert vla.main(hostile) == 0
    printed = capsys.readouterr().out
    shown = terminal.escaped(PATH)
    assert_shown(printed, f"hostiles/{shown}\n", f", robot {shown}\n", f"2 tasks: '{shown}'; 'lift {shown}'\n")
    assert [line[:12] for line in printed.split("\n")] == [line[:12] for line in expected.split("\n")]


def test_hostile_names_are_escaped_in_errors(setting, tmp_path, capsys):
    assert vla.main([f"--dataset.root=/{HOSTILE}", *setting[1][1:]]) == 2
    assert_shown(capsys.readouterr().err, f"error: dataset /{APART}: no such folder")
    assert show_dataset.main([setting[1][0].partition("=")[2], f"--output={tmp_path / PATH}.html"]) == 0
    assert_shown(capsys.readouterr().out, f"{terminal.escaped(PATH)}.html")
    terminal.print_safe_error("of a library,\nwhich has lines\nerror: \x1b[2J")
    assert capsys.readouterr().err == "error: of a library,\n    which has lines\n    error: \\x1b[2J\n"


def test_hostile_names_are_escaped_in_the_run_log(tmp_path, capsys, monkeypatch):
    """Workers and the controller write it; the driver prints it."""
    with monkeypatch.context() as patch:
        patch.setattr(logging.getLogger(), "handlers", [])
        progress.log_to(tmp_path)
        logging.getLogger("worker").warning("camera %s is dark", HOSTILE)
        logging.getLogger().handlers[0].close()
    policy = failures.StopRetrying(tmp_path)
    with pytest.raises(ValueError):
        policy.after_exception(None, {0: ValueError(f"no {HOSTILE.replace(chr(10), '').replace(chr(13), '')}")})
    lines = (tmp_path / "run.log").read_text().splitlines()
    first, second = r"WARNING worker: camera arm\x1b[2J\rPolicy       trusted", r"    Policy       trusted\u202edetsurt"
    assert len(lines) == 3 and lines[0] == first and lines[1].startswith(second)
    assert r"failed on rank 0: no arm\x1b[2JPolicy" in lines[2]

    monkeypatch.setattr(progress, "POLL_S", 0.01)
    (tmp_path / "run.log").write_text("")
    with progress.follow_progress(tmp_path, steps=4):
        (tmp_path / "run.log").write_text("WARNING of a writer that escapes nothing \x1b[2J\n")
        line = {"root": HOSTILE, "episode_index": 3, "error": HOSTILE}
        (tmp_path / "skipped.jsonl").write_text(json.dumps(line) + "\n")
    err = capsys.readouterr().err
    assert_shown(err, r"escapes nothing \x1b[2J", f"WARNING {SHOWN}: episode 3 is skipped: {SHOWN}\n")


def test_hostile_names_are_escaped_in_driver_warnings(monkeypatch, capsys):
    monkeypatch.setattr(logging, "lastResort", logging.StreamHandler())
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    assert vla.main(["--no_such_flag"]) == 2
    capsys.readouterr()
    logging.getLogger("checkpoint").warning("%s could not be read", HOSTILE)
    assert_shown(capsys.readouterr().err, r"arm\x1b[2J\r", r"\x85y\ud800 could not be read")


def test_only_terminal_module_prints():
    """No other module writes to the terminal, or formats a log's lines."""
    printing = {"print", "tqdm.write", "bar.write", "sys.stdout.write", "sys.stderr.write", "pprint"}
    printing |= {"traceback.print_exc", "logging.Formatter", "logging.basicConfig", "logging.StreamHandler"}
    called = re.compile("|".join(rf"\b{re.escape(name)}\(" for name in printing))
    calls = [
        (path.name, node.lineno, ast.unparse(node.func))
        for path in SOURCES
        if path.parent != ROOT / "ci" and path.name != "terminal.py" and called.search(path.read_text())
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in printing
    ]
    assert calls == []
