"""Mixtures of datasets with actions and of images with text alone, against LeRobot's steps, numpy and single runs."""

import json
import shutil
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from lerobot.datasets import LeRobotDataset
from lerobot.lerobot_types import TransitionKey
from lerobot.policies.pi05.processor_pi05 import Pi05PrepareStateTokenizerProcessorStep
from lerobot.processor import create_transition

from diagnostics import check_rows, show_dataset
from tests import in_process
from tests.data.test_metadata_v2 import as_v2
from tests.datasets import all_rows, make_dataset
from tests.in_process import RunRows, alone, in_ranks
from tests.tiny import make_base
from tests.training.test_insulated_run import ACTION_CHUNKS, SPARE_WORDS, largest_difference, trained, written
from util import full_tensor
from vla_finetuning.columns import IS_PRESENT, ROBOT
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.plan.describe import describe
from vla_finetuning.plan.look import look_at_rows
from vla_finetuning.plan.matching import _read_texts
from vla_finetuning.plan.resolve import resolve, with_stats
from vla_finetuning.policies.action_tokens import ActionTokenizer
from vla_finetuning.policies.attention import Choice
from vla_finetuning.policies.families.insulation import TOKENS
from vla_finetuning.policies.pipelines import tokenizer_step
from vla_finetuning.run.folder import CONFIG_NAME, attempts
from vla_finetuning.training import model
from vla_finetuning.training.checkpoint_writer import CheckpointWriter
from vla_finetuning.training.chunks import read_chunks, sample_chunks
from vla_finetuning.training.model import build_model, check_attention, make_prepare

TOP, WRIST = "observation.images.top", "observation.images.wrist"
TOKENS_OF_PROMPT, MASK_OF_PROMPT = "observation.language.tokens", "observation.language.attention_mask"
SUBTASKS = ["reach the red bin", "", "go on"]
QUESTIONS, ANSWERS = ("what_is red", "where is\nthe bin"), ["the red bin", "to the red", "on", "where it is", "red"]
PICTURES = {"cameras": {TOP: (40, 40)}, "action_dim": 0, "tasks": QUESTIONS}


def make_answers(root, **options):
    columns = {"state_dim": 0, "texts": {"answer": ANSWERS}}
    return make_dataset(root, episodes=(1, 1, 4, 1, 2), fps=4, seed=5, **PICTURES, **columns, **options)


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Create two datasets of a robot, questions about images without state and action, and videos with a state."""
    folder = tmp_path_factory.mktemp("texts")
    root = make_dataset(folder / "robot", episodes=(12, 9, 10), texts={"subtask": SUBTASKS})
    make_dataset(folder / "second", episodes=(8, 6), texts={"subtask": SUBTASKS}, seed=2)
    make_answers(folder / "answers")
    make_dataset(folder / "videos", episodes=(5, 4), **PICTURES, texts={"subtask": ["go to the red bin"]}, seed=6)
    meta = load_metadata(root)
    tasks = [*meta.tasks.values(), *QUESTIONS, *ANSWERS, "gantry: arm: go"]
    tasks += [f"go to the red bin, Subtask: {text}" for text in SUBTASKS]
    base = make_base(folder / "base", meta, tasks=tasks, chunk_size=6, spare_words=SPARE_WORDS, **in_process.TINY)
    ActionTokenizer.fit(ACTION_CHUNKS, SPARE_WORDS - 2).save(folder / "tokenizer")
    return folder, root, base


def resolved(setting, name, mixture=None, **changes):
    options = {"train.knowledge_insulation": "true", "train.action_tokenizer": setting[0] / "tokenizer"}
    options |= {"train.text_targets": "subtask", "batch_size": 4, "grad_accum": 1, "lr": 1e-3}
    options |= {"output_dir": setting[0] / name, "dataset.statistics": "stored"}
    if mixture is not None:
        members = {str(setting[0] / root): member for root, member in mixture.items()}
        options |= {"dataset.root": None, "dataset.mixture": json.dumps(members)}
    return in_process.resolved(setting, **{**options, **changes})


def roots_of(run):
    return [meta.root.rpartition("/")[2] for meta in run.rows.metas]


RENAMED = {"rename_map": {"answer": "subtask"}}
BOTH = {"answers": RENAMED, "robot": 1}
ALL = {"answers": RENAMED, "robot": 2, "second": 1, "videos": 1}


def read(run, rows):
    """Return the first rows of a run's stream, raw and prepared."""
    (raw,) = run.rows.source().read_rows(range(rows), rows)
    return raw, make_prepare(run.policy, run.rows)(raw)


def lerobot_prompts(state, tasks):
    transition = create_transition(observation={"observation.state": state}, complementary_data={"task": tasks})
    return Pi05PrepareStateTokenizerProcessorStep()(transition)[TransitionKey.COMPLEMENTARY_DATA]["task"]


# ---- rows ----------------------------------------------------------------------------------------------------------


def test_rows_without_actions_train_their_text_without_state_in_prompts(setting):
    run = resolved(setting, "rows", BOTH)
    assert roots_of(run) == ["robot", "answers"]
    raw, columns = read(run, 24)
    texts = raw["dataset_index"] == 1
    assert {True, False} == set(texts.tolist()) and {0, 1} == set((raw["position"][texts] % 2).tolist())
    assert written(run, columns)[: len(texts)] == [
        text if is_text or position % 2 == 0 else ""
        for text, is_text, position in zip(raw["subtask"], texts, raw["position"], strict=True)
    ]
    assert not columns[ROBOT].any() and (columns[TOKENS][texts] == -1).all() and (columns[TOKENS][~texts, 1] >= 0).all()
    assert columns[TOP + IS_PRESENT].all() and (columns[WRIST + IS_PRESENT] == ~texts).all()
    assert not columns[WRIST][texts].any() and columns[TOP][texts].any()

    # LeRobot's step with a state of no entries, whose label is removed.
    prompts = lerobot_prompts(torch.zeros(texts.sum(), 0), raw["task"][texts].tolist())
    assert all(", State: ;" in prompt for prompt in prompts)
    step = tokenizer_step(run.policy.processors()[0])
    expected = step._tokenize_text([prompt.replace(", State: ;", ";") for prompt in prompts])
    np.testing.assert_array_equal(columns[TOKENS_OF_PROMPT][texts], expected["input_ids"].numpy())
    np.testing.assert_array_equal(columns[MASK_OF_PROMPT][texts], expected["attention_mask"].numpy().astype(bool))

    frames = LeRobotDataset("local/answers", root=setting[0] / "answers", video_backend="pyav")
    for index, position in zip(raw["index"][texts].tolist()[:3], np.flatnonzero(texts).tolist()[:3], strict=True):
        frame = frames[index]
        assert (frame["task"], frame["answer"]) == (raw["task"][position], raw["subtask"][position])


def test_rows_without_actions_of_v21_equal_those_of_v30(setting, tmp_path):
    v30 = make_answers(tmp_path / "v3.0", data_files_size_in_mb=1e-6, video_files_size_in_mb=1e-6)
    rows = []
    for root in (v30, as_v2(v30, tmp_path / "v2.1")):
        run = resolved(setting, root.name, {str(setting[1]): 1, str(root): RENAMED})
        assert [meta.codebase_version for meta in run.rows.metas] == ["v3.0", root.name]
        raw, columns = read(run, 40)
        assert set(written(run, columns)) >= set(ANSWERS)
        rows.append({**raw, **columns})
    for key, values in rows[0].items():
        np.testing.assert_array_equal(rows[1][key], values, err_msg=key)


def test_rows_with_actions_equal_those_of_a_run_without_texts(setting):
    size = {"dataset.image_size": "[56, 56]"}
    run = resolved(setting, "beside", BOTH, **size)
    single = resolved(setting, "single", **size)
    raw, columns = read(run, 24)
    acting = np.flatnonzero(raw["dataset_index"] == 0)
    per_epoch = single.rows.per_epoch
    (epoch,) = single.rows.source((0, per_epoch)).read_rows(range(per_epoch), per_epoch)
    place = {int(index): at for at, index in enumerate(epoch["index"])}
    chosen = {key: values[[place[int(index)] for index in raw["index"][acting]]] for key, values in epoch.items()}
    expected = make_prepare(single.policy, single.rows)({**chosen, "position": raw["position"][acting]})
    assert columns.keys() - expected.keys() == {ROBOT, TOP + IS_PRESENT, WRIST + IS_PRESENT}
    for key, values in expected.items():
        np.testing.assert_array_equal(columns[key][acting], values, err_msg=key)
    assert run.robots[0].files == single.robots[0].files


def test_videos_of_a_known_robot_have_its_state_in_prompts(setting):
    run = resolved(setting, "state", ALL)
    raw, columns = read(run, 40)
    assert roots_of(run) == ["robot", "second", "answers", "videos"]
    videos = raw["dataset_index"] == 3
    state = torch.from_numpy(raw["observation.state"][videos])
    low, high = (run.robots[0].stats["observation.state"][name] for name in ("q01", "q99"))
    normalised = 2 * (state - torch.tensor(low)) / torch.tensor(high - low) - 1
    prompts = lerobot_prompts(normalised.float(), raw["task"][videos].tolist())
    expected = tokenizer_step(run.policy.processors()[0])._tokenize_text(prompts)["input_ids"].numpy()
    np.testing.assert_array_equal(columns[TOKENS_OF_PROMPT][videos], expected)
    assert (columns[TOKENS][videos] == -1).all() and set(written(run, columns)) >= {"go to the red bin"}


# ---- statistics, chunks, evaluation --------------------------------------------------------------------------------


def test_statistics_equal_numpys_over_datasets_with_actions(setting):
    """The state of videos is elsewhere."""
    run = with_stats(resolved(setting, "exact", ALL, **{"dataset.statistics": "exact"}))
    assert run.rows.metas[3].root.endswith("videos") and run.robots[0].datasets == (0, 1)
    keys = ["observation.state", "action"]
    first, second = (all_rows(setting[0] / name, keys) for name in ("robot", "second"))
    rows = run.rows.identity["rows_per_source"]
    weights = np.repeat([rows[0] / 31, rows[1] / 14], [31, 14])
    for key in keys:
        values, stats = np.concatenate([first[key], second[key]]), run.robots[0].stats[key]
        np.testing.assert_allclose(stats["min"], values.min(axis=0), rtol=1e-5)
        np.testing.assert_allclose(stats["max"], values.max(axis=0), rtol=1e-5)
        mean = np.average(values, axis=0, weights=weights)
        np.testing.assert_allclose(stats["mean"], mean, rtol=1e-4, atol=1e-5)
        deviation = np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weights))
        np.testing.assert_allclose(stats["std"], deviation, rtol=1e-4)


def test_tokenizer_is_fitted_to_rows_with_actions(setting, monkeypatch):
    run, single = resolved(setting, "chunks", BOTH), resolved(setting, "chunks alone")
    (chunks,), (expected,) = sample_chunks(run), sample_chunks(single)
    np.testing.assert_array_equal(chunks.values, expected.values)
    # From the stream, as before the first step: rows without actions are read, and left out of the chunks.
    monkeypatch.setattr("vla_finetuning.training.chunks.read_source", lambda source: _Rows(source, run.rows.per_epoch))
    raw, columns = read(run, run.rows.per_epoch)
    (chunks,) = read_chunks(run)
    np.testing.assert_array_equal(chunks.values, columns["action"][raw["dataset_index"] == 0])
    assert 0 < len(chunks.values) < len(raw["index"])


class _Rows:
    """Stands in for Ray's dataset."""

    def __init__(self, source, rows):
        self._batches = [source._reading.prepare(batch) for batch in source.read_rows(range(rows), rows)]

    def iter_batches(self, **_):
        return iter(self._batches)


def test_options_of_actions_are_refused_for_a_dataset_without_them(setting):
    with pytest.raises(ValueError, match="answers has no actions: leave state, action and fps out of its entry"):
        resolved(setting, "fps", {**BOTH, "answers": {**RENAMED, "fps": 2}})


def test_texts_for_a_new_policy_are_read_without_the_rows_that_are_skipped(setting, tmp_path):
    root = shutil.copytree(setting[0] / "robot", tmp_path / "robot")
    meta = load_metadata(root)
    (path,) = root.glob("data/*/*.parquet")
    path.rename(path.with_name("other.parquet"))  # an empty folder would be an unmounted drive
    texts = {}
    for on_error in ("skip", "stop"):
        config = parse_args([f"--dataset.root={root}", "--preset=demo", f"--dataset.on_error={on_error}"])
        with pytest.raises(FileNotFoundError) if on_error == "stop" else nullcontext():
            texts[on_error] = _read_texts(config, meta, np.arange(3), "subtask")
    assert texts == {"skip": {""}}


def test_episodes_without_actions_are_neither_held_out_nor_idle(setting):
    changes = {"dataset.eval_split": 0.4, "eval_steps": 2, "dataset.skip_idle": 5}
    run = resolved(setting, "held out", BOTH, **changes)
    assert [len(episodes) for episodes in run.rows.eval_episodes] == [2, 0]
    assert len(run.rows.train_episodes[1]) == 5 and run.rows.per_dataset[1] == 9
    assert set(run.rows.held_out_rows(0).dataset.tolist()) == {0}
    chunk, short, episodes, _ = run.rows.padding()
    assert (chunk, short, episodes) == (6, 0, 1)


# ---- training -----------------------------------------------------------------------------------------------------


def test_two_workers_with_uneven_texts_equal_one(setting):
    torch.save(trained(resolved(setting, "one worker", BOTH), RunRows), file := setting[0] / "one worker.pt")
    for difference in in_ranks(in_rank, setting, file, world=2):
        assert difference < 5e-6


def in_rank(rank, world, setting, file):
    options = {"batch_size": 2, "scaling.num_workers": world, "scaling.strategy": "fsdp2"}
    run = resolved(setting, f"rank {rank}", BOTH, **options)
    return largest_difference(trained(run, RunRows, rank, world), torch.load(file))


def test_rows_come_exactly_once_and_resumed_run_equals_uninterrupted_run(setting):
    """12 steps of 4 rows are more than an epoch of the robot's 31 rows and of the 9 questions; lost from step 5 on."""

    def run_to_end(name, first_step=0):
        options = {"steps": 12, "save_freq": 5, "keep_checkpoints": 9, "log_freq": 4, "run.record_rows": "true"}
        run = resolved(setting, name, {"answers": RENAMED, "robot": 3}, **options)
        run.job.output_dir.mkdir(exist_ok=True)
        (run.job.output_dir / CONFIG_NAME).write_text(json.dumps(run.config.to_json()))
        tensors = in_process.train(run, worker=alone(run, first_step), make_checkpoints=CheckpointWriter).named()
        return run, {name: full_tensor(tensor).clone() for name, tensor in tensors.items()}

    run, expected = run_to_end("once")
    assert check_rows.main([str(run.job.output_dir)]) == 0
    lost = shutil.copytree(run.job.output_dir, setting[0] / "lost")
    for step in (10, 12):
        shutil.rmtree(lost / "checkpoints" / f"step_{step:08d}")
    run, resumed = run_to_end("lost", first_step=5)
    assert check_rows.main([str(lost)]) == 0
    assert [line["resumed_from_step"] for line in attempts(lost)] == [0, 5]
    reread = resolve(parse_args([f"--output_dir={lost}", "--resume"]), gpus_found=0)
    assert reread.rows.identity == run.rows.identity
    assert all(torch.equal(resumed[name], tensor) for name, tensor in expected.items())
    lines = [json.loads(line) for line in (lost / "metrics.jsonl").read_text().splitlines()]
    assert all(np.isfinite([line["flow_loss"], line["token_loss"], line["text_loss"]]).all() for line in lines)


def test_different_robots_have_their_own_prompts_and_masks(setting, tmp_path, monkeypatch):
    make_dataset(tmp_path / "arm", episodes=(9, 8), state_dim=5, action_dim=4, seed=3, texts={"subtask": SUBTASKS})
    robots = {str(tmp_path / "arm"): "arm", "robot": "gantry", "answers": "web", "videos": "gantry"}
    mixture = {root: {"robot": robot} for root, robot in robots.items()}
    mixture["answers"] |= RENAMED
    changes = {"dataset.robot_in_prompt": "true", "train.action_tokenizer": "fit"}
    run = resolved(setting, "robots", mixture, **changes)
    assert [robot.name for robot in run.robots] == ["arm", "gantry"]
    assert roots_of(run) == ["arm", "robot", "answers", "videos"]
    raw, columns = read(run, 32)
    number = raw["dataset_index"]
    assert (columns[ROBOT] == np.array([0, 1, 0, 1])[number]).all()
    assert (columns[WRIST + IS_PRESENT] == (number < 2)).all()
    tokenizer = tokenizer_step(run.policy.processors()[0]).input_tokenizer
    openings = ("task : arm : ", "task : gantry : ", "task : w", "task : gantry : ")
    for dataset, tokens, mask in zip(number, columns[TOKENS_OF_PROMPT], columns[MASK_OF_PROMPT], strict=True):
        prompt = tokenizer.decode(tokens[mask])
        assert prompt.startswith(openings[dataset]) and ("state" in prompt) == (dataset != 2), prompt
    assert len(sample_chunks(run)) == 2

    loss, _ = build_model(run.policy, torch.device("cpu"))
    checked = set()

    def choose_kernel(kernel, attentions, *_):
        checked.update(shape.images for _, shape in attentions if shape.name == "text")
        return Choice(kernel, {}, [])

    monkeypatch.setattr(model, "choose_kernel", choose_kernel)
    check_attention(run.policy, loss, torch.device("cpu"), None)
    assert len(checked) == 2  # of two cameras, and of the one of the questions


# ---- messages ------------------------------------------------------------------------------------------------------


def test_datasets_without_actions_are_described(setting, tmp_path, capsys):
    run = resolved(setting, "described", BOTH)
    assert "answers: no actions: its rows train the text of 'subtask' alone; no episode is" in describe(run)
    assert [line.split(":")[0].rpartition("/")[2] for line in look_at_rows(run)] == ["robot", "answers"]
    members = [{"root": str(setting[0] / name)} for name in ("robot", "answers")]
    (tmp_path / "mix.yaml").write_text(json.dumps({"members": members}))
    assert show_dataset.main([f"@{tmp_path / 'mix.yaml'}"]) == 0
    printed = capsys.readouterr().out
    assert "answers: no actions: 5 episodes, 9 frames with the texts answer, which train" in printed
    assert "no misfits" in printed


@pytest.mark.parametrize(
    "mixture, changes, message",
    [
        (BOTH, {"train.text_targets": None}, "answers: no feature is called action; .*--train.text_targets subtask"),
        ({"answers": RENAMED}, {}, "no feature is called action, and no dataset of the run has one: name it beside"),
        (BOTH, {"recap.labels": "labels.parquet"}, "--recap.labels: dataset .*answers has no actions"),
    ],
)
def test_unusable_text_datasets_are_refused(setting, mixture, changes, message):
    with pytest.raises(ValueError, match=message):
        resolved(setting, "refused", mixture, **changes)


def test_camera_that_no_robot_has_is_refused_by_name(setting, tmp_path):
    camera = {"cameras": {"observation.images.web": (40, 40)}, "state_dim": 0, "action_dim": 0}
    make_dataset(tmp_path / "web", episodes=(2, 1), **camera, texts={"subtask": ["go"]})
    mixture = {str(tmp_path / "web"): 1, str(setting[1]): 1}
    with pytest.raises(ValueError, match=r"web: none of its cameras \['observation.images.web'\] is called as one of"):
        resolved(setting, "camera", mixture)
    mixture[str(tmp_path / "web")] = {"rename_map": {"observation.images.web": WRIST}}
    run = resolved(setting, "camera", mixture)
    raw, columns = read(run, 16)
    assert (columns[WRIST + IS_PRESENT]).all() and (columns[TOP + IS_PRESENT] == (raw["dataset_index"] == 0)).all()
