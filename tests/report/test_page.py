"""The report of a run: content, updates during the run, and rendering in Chromium."""

import base64
import contextlib
import html
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.buckets import runs_bucket
from tests.datasets import edit_json, make_dataset
from tests.loopback import Handler, serving
from tests.pages import check_page
from tests.report.test_numbers import errors_of
from tests.tiny import make_base
from vla_finetuning import files
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.files import append_line, write_json
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.options.job import CONFIG_NAME
from vla_finetuning.plan.describe import describe
from vla_finetuning.plan.record import record_run
from vla_finetuning.plan.resolve import resolve
from vla_finetuning.report import dataset_look
from vla_finetuning.report import page as report
from vla_finetuning.report.page import keep_report, write_report

HOSTILE = "<script>alert('task')</script> & more"
TASKS = (HOSTILE, "go to the blue bin")
LOG_FREQ, STEPS, ACTIONS = 5, 60, 3


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the folder of a run that failed twice."""
    folder = tmp_path_factory.mktemp("report")
    root = make_dataset(
        folder / "data",
        episodes=(12, 9, 12, 10),
        tasks=TASKS,
        cameras={},
        image_cameras={"observation.images.top": (48, 64)},
    )
    meta = load_metadata(root)
    base = make_base(folder / "base", meta, chunk_size=8)
    flags = {
        "dataset.root": root,
        "dataset.eval_split": 0.1,
        "policy.path": base,
        "output_dir": folder / "run <b>",
        "scaling.num_workers": 4,
        "batch_size": 2,
        "steps": STEPS,
        "train.mode": "full",
    }
    run = resolve(parse_args([f"--{k}={v}" for k, v in flags.items()]), gpus_found=4)
    run.job.output_dir.mkdir()
    write_json(run.job.output_dir / CONFIG_NAME, run.config.to_json())
    cluster = {"CPU": 32.0, "GPU": 4.0, "memory": 2**36, "node:10.0.0.1": 1, "accelerator_type:L4": 1}
    record_run(run.job, run.policy, describe(run), cluster, run.rows)
    for step in range(LOG_FREQ, STEPS + 1, LOG_FREQ):
        line = {"step": step, "lr": 1e-3 / step, "loss": 2 / step, "nonfinite_steps": 0, "samples": 8 * step}
        line |= {"samples_per_s": 4.0, "step_s": 2.0, "data_wait_s": 0.5}
        append_line(run.job.output_dir / "metrics.jsonl", json.dumps(line))
    write_json(run.job.output_dir / "evaluation.json", errors_of(ACTIONS))
    for n, step, world in (1, 0, 4), (2, 20, 4), (3, 40, 3):
        attempt = {"attempt": n, "resumed_from_step": step, "world_size": world}
        append_line(run.job.output_dir / "attempts.jsonl", json.dumps(attempt))
    skipped = {"episode_index": 7, "frame_index": 3, "reason": HOSTILE}
    append_line(run.job.output_dir / "skipped.jsonl", json.dumps(skipped))
    return run.job.output_dir


@pytest.fixture
def folder(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / finished.name)


def read(folder, looks=()):
    """Write and read the report, by default without its slow dataset part."""
    return check_page(write_report(folder, looks).read_text())


@pytest.fixture(scope="module")
def page(finished):
    return check_page(write_report(finished).read_text())


def test_page_summarizes_run(page):
    for part in (
        "run <b>",
        f"All {STEPS} steps done.",
        # The plan, as it was printed.
        "4 episodes, 43 frames at 10 fps, robot test_arm trains on 2 episodes",
        "2 rows x 1 micro-steps x 4 workers = 8 per step",
        "4 GPU workers; cluster of 1 node: 32 CPUs, 4 GPUs (L4), 64 GiB of memory",
        f"torch {torch.__version__.partition('+')[0]}",
        "2 min 00 s in training steps, 480 samples",
    ):
        assert part in page.text, part
    assert "waiting for data 25%" in page.text and "Dashed lines" in page.text
    assert "nonfinite_steps: 0 throughout." in page.text


def test_page_shows_restarts_skipped_rows_and_dataset(page):
    assert "The training processes were started 3 times." in page.text
    assert "1 0 4 2 20 4 3 40 3" in page.text
    assert f"1 skipped episode_index frame_index reason 7 3 {HOSTILE}" in page.text
    assert len(page.all("img")) == dataset_look.MOMENTS
    assert all(base64.b64decode(i["src"].partition("base64,")[2])[:2] == b"\xff\xd8" for i in page.all("img"))
    labels = [svg["aria-label"] for svg in page.all("svg")]
    assert "Predicted and recorded actions of motor_0, motor_1, motor_2" in labels
    assert any("Histogram of episode lengths: 4 episodes" in label for label in labels)


def test_page_states_missing_files(folder, tmp_path):
    (folder / "evaluation.json").unlink()
    assert "is measured at the end of the run" in read(folder).text
    (tmp_path / "empty").mkdir()
    text = read(tmp_path / "empty", None).text
    for sentence in ("Nothing has been logged yet", "does not say where the dataset is", "There is no config.json"):
        assert sentence in text
    write_json(tmp_path / "empty" / CONFIG_NAME, {"value": {"bins": 3}, "dataset": {"eval_split": 0.2}})
    text = read(tmp_path / "empty").text  # a value function has no open-loop error
    assert "Held-out episodes" not in text and "Dataset" in text


def test_page_survives_nan_loss_partial_line_and_missing_dataset(folder):
    path = folder / "metrics.jsonl"
    *lines, last = path.read_text().splitlines()
    last = json.dumps({**json.loads(last), "loss": float("nan")})
    path.write_text("\n".join([*lines, last, '{"step": 65, "lo']))
    edit_json(folder / "run.json", lambda facts: facts.update(datasets=[{"root": str(folder / "gone")}] * 6))
    page = read(folder, looks=None)
    assert "could not be looked at" in page.text and "no such folder" in page.text
    assert "2 more datasets are not shown" in page.text
    assert "All 60 steps done." in page.text
    assert any("loss over steps: from 0.4 to 0.03636" in svg["aria-label"] for svg in page.all("svg"))


def test_report_is_written_at_start_checkpoints_and_end(folder, monkeypatch):
    written, written_again = [], threading.Event()

    def write(folder, looks):
        written.append(sorted(path.name for path in folder.glob("checkpoints/*")))
        written_again.set()

    monkeypatch.setattr(report, "POLL_S", 0.01)
    monkeypatch.setattr(report, "write_report", write)
    with pytest.raises(RuntimeError, match="worker"), keep_report(folder):
        assert written_again.wait(60)
        written_again.clear()
        (folder / "checkpoints" / "step_00000010").mkdir(parents=True)
        (folder / "checkpoints" / "step_00000010" / "state.json").touch()
        assert written_again.wait(60)
        raise RuntimeError("a worker died")
    assert written == [[], ["step_00000010"], ["step_00000010"]]


def test_report_failure_is_only_warning(folder, monkeypatch, caplog):
    monkeypatch.setattr(report, "look_at_datasets", lambda folder: [])
    (folder / "report.html").unlink(missing_ok=True)
    metrics = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text("not json\n")
    with keep_report(folder):
        pass
    assert "report.html could not be written: ValueError" in caplog.text
    assert not (folder / "report.html").exists()
    (folder / "metrics.jsonl").write_text(metrics)
    with keep_report(folder):
        pass
    assert "All 60 steps done." in check_page((folder / "report.html").read_text()).text


def test_report_is_replaced_atomically(folder, monkeypatch):
    before = write_report(folder, []).read_text()
    replace, pages = files.os.replace, []
    monkeypatch.setattr(
        files.os, "replace", lambda a, b: (pages.append((folder / "report.html").read_text()), replace(a, b))
    )
    (folder / "metrics.jsonl").unlink()
    assert write_report(folder, []).read_text() != before and pages == [before]
    assert [path.name for path in folder.glob(".*")] == []


def test_report_command_rewrites_page(folder, tmp_path, capsys):
    assert report.main([str(folder)]) == 0
    assert Path(capsys.readouterr().out.strip()) == folder / "report.html"
    assert report.main([str(tmp_path / "nowhere")]) == 2
    assert "holds no run" in capsys.readouterr().err
    with runs_bucket():
        assert report.main(["s3://nowhere/run"]) == 2
    assert "there is no s3://nowhere" in capsys.readouterr().err


# Shows a page in a frame as wide as a screen (a window is never narrower than 500), and writes what is seen of it.
PROBE = """<!doctype html><iframe style="width: WIDTHpx; height: 900px; border: 0"></iframe><script>
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument, view = frame.contentWindow, all = tags => [...page.querySelectorAll(tags)];
  all("details").forEach(d => { d.open = true; });
  const texts = all("svg text").filter(t => t.textContent.trim()), focusable = all("a[href], summary, [tabindex='0']");
  document.body.textContent = "SEEN" + JSON.stringify({
    overflow: page.documentElement.scrollWidth - view.innerWidth,
    svgs: all("svg").map(s => s.getBoundingClientRect()).map(r => [r.width, r.height, r.right]),
    sizes: texts.map(t => parseFloat(view.getComputedStyle(t).fontSize) * t.getScreenCTM().a).filter(Boolean),
    images: [...page.images].map(i => i.naturalWidth),
    paper: view.getComputedStyle(page.body).backgroundColor,
    inks: [...new Set(texts.map(t => view.getComputedStyle(t).fill))],
    unreachable: focusable.filter(e => (e.focus(), page.activeElement !== e)).map(e => e.outerHTML.slice(0, 80)),
    outline: (focusable[1].focus({focusVisible: true}), view.getComputedStyle(focusable[1]).outlineStyle),
  }) + "SEEN";
};
frame.srcdoc = PAGE;
</script>"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Return a function that loads a page and returns its document and console lines."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium: apt-get install chromium")

    def show(path, *flags):
        out, err = (tmp_path_factory.mktemp("browser") / name for name in ("out", "err"))
        options = ["--headless=new", "--no-sandbox", "--no-zygote", "--disable-gpu", "--disable-dev-shm-usage"]
        options += [f"--user-data-dir={out.parent / 'profile'}", "--enable-logging=stderr", "--dump-dom"]
        command = [chromium, *options, *flags, "--virtual-time-budget=4000", f"file://{path}"]
        # Files, and a group of its own: what it starts would keep pipes open, and must not outlive a time limit.
        with open(out, "w") as out_file, open(err, "w") as err_file:
            process = subprocess.Popen(command, stdout=out_file, stderr=err_file, start_new_session=True)
            try:
                process.wait(timeout=120)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return out.read_text(), [line for line in err.read_text().splitlines() if "CONSOLE" in line]

    return show


class Heard(Handler):
    def do_GET(self):
        self.server.paths.append(self.path)
        self.answer(404)


@pytest.mark.parametrize("protected", [pytest.param(False, marks=pytest.mark.gate), True])
def test_content_security_policy_blocks_injected_markup(browser, folder, tmp_path, protected):
    """Without the policy, all of the markup takes effect."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Heard)
    server.paths = []
    with serving(server) as url:
        planted = (
            f"<style>@import '{url}/import'; body {{ background: #123456 !important }}</style>"
            f"<img src={url}/img alt=x><link rel=stylesheet href={url}/sheet><iframe src={url}/frame></iframe>"
            f"<script src={url}/script></script><script>document.body.style.color = '#654321'</script>"
            f"<img src=data:x onerror=\"fetch('{url}/handler')\" alt=x><p style='background: url({url}/url)'>x</p>"
        )
        page = re.sub("(<main [^>]*>)", lambda main: main[1] + planted, write_report(folder, []).read_text())
        if not protected:
            page = re.sub("<meta http-equiv=[^>]*>", "", page)
        (tmp_path / "planted.html").write_text(page)
        document, console = browser(tmp_path / "planted.html")
    paths = {path.removeprefix("/") for path in server.paths} - {"favicon.ico"}
    if protected:
        assert paths == set() and 'style="color' not in document and len(console) >= 7
        assert all("Content Security Policy" in line for line in console)
    else:
        assert paths == {"import", "img", "sheet", "frame", "script", "handler", "url"}
        assert 'style="color' in document


def luminance(colour):
    levels = np.array(re.findall(r"\d+", colour)[:3], float) / 255
    return np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4) @ (0.2126, 0.7152, 0.0722)


@pytest.mark.gate
@pytest.mark.parametrize(("width", "is_light"), [(1280, True), (390, False)])
def test_browser_renders_page_legibly(browser, folder, tmp_path, width, is_light):
    """On wide light and narrow dark screens: fit, contrast and keyboard access."""
    shown, probe = json.dumps(write_report(folder).read_text()).replace("<", "\\u003c"), tmp_path / "probe.html"
    probe.write_text(PROBE.replace("WIDTH", str(width)).replace("PAGE", shown))
    flags = f"--blink-settings=preferredColorScheme={int(is_light)}", "--window-size=1400,900"
    document, console = browser(probe, *flags)
    rendered = json.loads(html.unescape(document.split("SEEN")[1]))
    assert console == [] and rendered["overflow"] <= 0 and len(rendered["svgs"]) >= 8
    assert all(w >= min(300, width - 80) and h >= 80 and right <= width for w, h, right in rendered["svgs"])
    assert len(rendered["sizes"]) > 50 and min(rendered["sizes"]) >= 9
    assert rendered["images"] == [64] * dataset_look.MOMENTS
    assert rendered["unreachable"] == [] and rendered["outline"] == "solid"
    paper = luminance(rendered["paper"])
    assert paper > 0.9 if is_light else paper < 0.02
    for ink in map(luminance, rendered["inks"]):
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= 4.5  # WCAG 2.2, 1.4.3
