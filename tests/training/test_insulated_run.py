"""Runs with knowledge insulation: losses over shared micro-batches and workers against one, and their tokenizers."""

import numpy as np
import pytest
import torch

import vla
from tests import in_process
from tests.datasets import add_subtasks, make_dataset
from tests.in_process import Rank, in_ranks
from tests.tiny import make_base
from tests.training.test_export import check_export
from util import full_tensor
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.plan.describe import describe
from vla_finetuning.policies.action_tokens import ACTION_TOKENIZER_FOLDER, ActionTokenizer
from vla_finetuning.policies.families.insulation import ADAPTED, TOKENS, InsulatedPI05
from vla_finetuning.policies.family import Chunks
from vla_finetuning.policies.pipelines import tokenizer_step
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.text_targets import TEXT, TEXT_COLUMNS, ends_of_text, with_text
from vla_finetuning.run.push import exported_files
from vla_finetuning.training import chunks
from vla_finetuning.training.checkpoint_writer import CheckpointWriter
from vla_finetuning.training.export import export, exported_checkpoint
from vla_finetuning.training.model import make_prepare

SPARE_WORDS = 270
ACTION_CHUNKS = np.random.default_rng(0).normal(size=(50, 10, 4)).cumsum(axis=1).clip(-1, 1)
SUBTASKS = ["reach the red bin", "go_on  "]
# Runs of one worker and of two.
RUNS: dict[str, dict] = {
    "ddp": {"text": True},
    "fsdp2_reshard": {},
    "adapters": {"text": True, "peft.target_modules": ADAPTED},
}


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("insulated")
    root = make_dataset(folder / "dataset", episodes=(12, 9, 10))
    add_subtasks(root, lambda index: index % 3 - 1, SUBTASKS)
    meta = load_metadata(root)
    tasks = [with_text(task, text.replace("_", " ")) for task in meta.tasks.values() for text in SUBTASKS]
    base = make_base(folder / "base", meta, tasks=tasks, spare_words=SPARE_WORDS, **in_process.TINY)
    ActionTokenizer.fit(ACTION_CHUNKS, SPARE_WORDS - 2).save(folder / "tokenizer")
    return folder, root, base


def resolved(setting, name, **changes):
    options = {"train.knowledge_insulation": "true", "train.action_tokenizer": setting[0] / "tokenizer"}
    options = {} if changes.pop("plain", False) else options
    options |= {"train.text_targets": "subtask"} if changes.pop("text", False) else {}
    options |= {"batch_size": 4, "grad_accum": 1, "lr": 1e-3, "output_dir": setting[0] / name, **changes}
    return in_process.resolved(setting, **options)


class Shard(in_process.RunRows):
    """Rows of a rank with 1 to 7 action tokens and 0 to 16 of text, by position."""

    def iter_torch_batches(self, *, collate_fn, **options):
        def collate(rows):
            targets = {TOKENS: rows["position"] % 7 + 1, TEXT: rows["position"] % 5 * 4}
            for name in targets.keys() & rows.keys():
                begin, width = rows[name][:, : name == TOKENS], rows[name].shape[1]
                drawn = [np.random.default_rng(p).integers(0, 200, width - begin.shape[1]) for p in rows["position"]]
                tokens = np.concatenate([begin, drawn], axis=1)
                rows = {**rows, name: np.where(np.arange(width) <= targets[name][:, None], tokens, -1)}
            return collate_fn(rows)

        return super().iter_torch_batches(collate_fn=collate, **options)


def trained(run, shard=Shard, rank=0, world=1):
    tensors = in_process.train(run, worker=Rank(rank, world, shard(run, rank, world))).named()
    return {name: full_tensor(tensor).detach().clone() for name, tensor in tensors.items()}


def largest_difference(weights, expected):
    """Compare weights, except biases of keys, whose gradients are rounding errors."""
    assert weights.keys() == expected.keys() and len(weights) > 10
    names = [name for name in weights if "k_proj.bias" not in name]
    return max(((weights[name] - expected[name]).norm() / (1 + expected[name].norm())).item() for name in names)


@pytest.fixture(scope="module")
def one_worker(setting):
    """Return the weights of each run with one worker and one micro-batch a step, and a file of them."""
    weights = {name: trained(resolved(setting, f"one-{name}", **changes)) for name, changes in RUNS.items()}
    assert all("lora_" in name for name in weights["adapters"])
    torch.save(weights, file := setting[0] / "one.pt")
    return weights, file


def test_two_micro_batches_with_unequal_tokens_equal_one(setting, one_worker):
    halves = resolved(setting, "halves", text=True, batch_size=2, grad_accum=2)
    assert largest_difference(trained(halves), one_worker[0]["ddp"]) < 5e-6


def in_rank(rank, world, setting, file):
    expected, differences = torch.load(file), {}
    for name, changes in RUNS.items():
        strategy = name if name == "fsdp2_reshard" else "ddp"
        options = {"batch_size": 2, "scaling.num_workers": world, "scaling.strategy": strategy, **changes}
        weights = trained(resolved(setting, f"{rank}-{name}", **options), Shard, rank, world)
        differences[name] = largest_difference(weights, expected[name])
    return differences


def test_two_workers_with_unequal_tokens_equal_one(setting, one_worker):
    for differences in in_ranks(in_rank, setting, one_worker[1], world=2):
        assert differences.keys() == RUNS.keys() and max(differences.values()) < 5e-6, differences


def test_plan_counts_flops_and_rows_have_action_tokens(setting):
    run, plain = resolved(setting, "planned"), resolved(setting, "plain", plain=True)
    assert "(--train.mode full, insulated)" in describe(run)
    # Adapters with another loss are another mode, so that a run is not resumed with it.
    modes = {"insulated": False, "insulated, writes subtask": True}
    for mode, text in modes.items():
        adapted = resolved(setting, "adapted", text=text, **{"peft.target_modules": ADAPTED})
        assert adapted.job.start.mode.partition("_proj), ")[2] == mode
    assert run.policy.parameters.trainable > plain.policy.parameters.trainable
    longest = max(run.policy.prompts)
    assert run.policy.flops_by_prompt[longest] > 1.05 * plain.policy.flops_by_prompt[longest]
    columns = vla.build_dataset(run)
    row = columns.prepare(columns.read(stream=(0, run.rows.last_row)).example())
    tokenizer = ActionTokenizer.load(setting[0] / "tokenizer")
    ids, end = tokenizer.encode(row["action"])[0], tokenizer.vocabulary
    assert row[TOKENS][0, : len(ids) + 3].tolist() == [end + 1, *ids, end, -1]


def written(run, columns):
    """Decode the texts that rows train."""
    preprocessor, _ = run.policy.processors()
    tokenizer, texts = tokenizer_step(preprocessor).input_tokenizer, []
    for tokens in columns[TEXT]:
        ids = tokens[tokens >= 0]
        assert not len(ids) or (ids[0], ids[-1]) == ends_of_text(tokenizer)
        texts.append(tokenizer.decode(ids[1:-1]))
    return texts


def test_every_second_row_has_subtask_in_prompt_and_others_as_target(setting):
    run, silent = resolved(setting, "texts", text=True), resolved(setting, "silent")
    assert "(--train.mode full, insulated, writes subtask)" in describe(run)
    assert "not read" not in describe(run) and "not read: subtask" in describe(silent)
    longest = max(run.policy.prompts)
    assert [robot.files["robot.json"].get("writes") for robot in (run.robots[0], silent.robots[0])] == ["subtask", None]
    assert run.policy.flops_by_prompt[longest] > silent.policy.flops_by_prompt[longest]
    prepare = make_prepare(run.policy, run.rows)
    (rows,) = run.rows.in_stored_order().read_rows(range(6), 6)
    texts = ["", "reach the red bin", "go on"] * 2
    assert [" ".join(text.replace("_", " ").split()) for text in rows["subtask"]] == texts
    unplaced, placed = prepare(rows), prepare({**rows, "position": np.arange(6)})
    assert written(run, unplaced) == texts
    assert written(run, placed) == ["", "", "go on", "", "reach the red bin", ""]
    plain = make_prepare(silent.policy, silent.rows)
    instructions = [with_text(task, text) for task, text in zip(rows["task"], texts, strict=True)]
    with_subtask = plain({**rows, "task": np.array(instructions, object)})["observation.language.tokens"]
    without = plain(rows)["observation.language.tokens"]
    assert (with_subtask[1] != without[1]).any()
    assert np.array_equal(unplaced["observation.language.tokens"], without)
    expected = np.where(np.arange(6)[:, None] % 2 == 1, with_subtask, without)
    assert np.array_equal(placed["observation.language.tokens"], expected)
    assert all(np.array_equal(placed[key], plain(rows)[key]) for key in (TOKENS, "action"))


@pytest.mark.parametrize(("text", "error"), [
    ("red " * TEXT_COLUMNS, "has 32 tokens, more than 31: shorten it"),
    ("reach the purple bin", "the policy's tokenizer lacks a word of 'reach the purple bin': name a policy"),
], ids=["too long", "of an unknown word"])  # fmt: skip
def test_text_that_cannot_be_tokenized_is_refused(setting, text, error):
    run = resolved(setting, "long", text=True)
    (rows,) = run.rows.in_stored_order().read_rows([1], 1)
    rows["subtask"] = np.array([text], object)
    with pytest.raises(ValueError, match=error):
        make_prepare(run.policy, run.rows)(rows)


def test_resumed_run_uses_its_first_tokenizer(setting, tmp_path):
    actions = np.random.default_rng(1).normal(size=(50, 10, 4)).cumsum(axis=1).clip(-1, 1)
    sample = [Chunks(actions, np.zeros(4), np.ones(4), tuple("abcd"))]
    first = InsulatedPI05("pi05", vocabulary=SPARE_WORDS - 2).fit_to_rows(lambda: sample, None)
    first.save_fitted(tmp_path)
    assert first.action_tokenizer == ActionTokenizer.fit(actions, SPARE_WORDS - 2)
    assert InsulatedPI05("pi05").fit_to_rows(lambda: pytest.fail("read again"), tmp_path) == first
    different = InsulatedPI05("pi05", action_tokenizer=ActionTokenizer.load(setting[0] / "tokenizer"))
    with pytest.raises(ValueError, match="has the tokenizer that this run was started with"):
        different.fit_to_rows(lambda: sample, tmp_path)


def test_tokenizer_is_fitted_anew_until_there_is_a_checkpoint(setting, monkeypatch):
    run = resolved(setting, "anew", **{"train.action_tokenizer": "fit"})
    folder = run.job.output_dir / ACTION_TOKENIZER_FOLDER
    ActionTokenizer.load(setting[0] / "tokenizer").save(folder)
    sample = [Chunks(ACTION_CHUNKS[:20], np.zeros(4), np.ones(4), tuple("abcd"))]
    monkeypatch.setattr(chunks, "read_chunks", lambda run: sample)
    fitted = family_of(chunks.fit_to_rows(run).policy.config).action_tokenizer
    assert fitted == ActionTokenizer.load(folder) != ActionTokenizer.load(setting[0] / "tokenizer")
    run = resolved(setting, "anew", **{"train.action_tokenizer": "fit"})
    monkeypatch.setattr(chunks, "latest_checkpoint", lambda folder: folder / "step_00000001")
    monkeypatch.setattr(chunks, "read_chunks", lambda run: pytest.fail("read again"))
    assert family_of(chunks.fit_to_rows(run).policy.config).action_tokenizer == fitted


def family_from(setting, policy, tokenizer):
    run = resolved(setting, "next", **{"policy.path": policy, "train.action_tokenizer": tokenizer})
    return family_of(run.policy.config)


def test_tokenizer_is_exported_with_policy_and_used_by_later_runs(setting):
    run = resolved(setting, "exported", steps=1)
    in_process.train(run, worker=in_process.alone(run), make_checkpoints=CheckpointWriter)
    export(run.policy, exported_checkpoint(run.job, best=False), run.job.output_dir)
    folder = run.job.output_dir / "pretrained_model"

    tokenizer = ActionTokenizer.load(setting[0] / "tokenizer")
    assert family_from(setting, folder, None).action_tokenizer == tokenizer
    assert family_from(setting, folder, "fit").action_tokenizer is None
    assert family_from(setting, setting[2], None).action_tokenizer is None
    next_base = resolved(setting, "next", plain=True, **{"policy.path": folder}).policy.base
    tokenizer_files = {f"action_tokenizer/{name}.json" for name in ("tokenizer", "processor_config")}
    assert next_base["files"].keys() - run.policy.base["files"].keys() == {*tokenizer_files, "robot.json"}
    files, leftovers = exported_files(folder)
    assert tokenizer_files < set(files) and not leftovers
    check_export(folder, setting[1])

    (folder / "action_tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="is no action tokenizer"):
        family_from(setting, folder, None)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"train.mode": "expert"}, "--train.mode=full"),
        ({"train.mask_padding": "true"}, "action tokens encode the whole chunk"),
        ({"peft.method_type": "lora"}, "the language model has no adapter that could learn from tokens"),
        ({"train.action_tokenizer": "/nowhere"}, "no folder, and the Hub gives none of that name"),
        ({"plain": True, "train.flow_weight": 2}, "does nothing without"),
        ({"plain": True, "text": True}, "--train.knowledge_insulation"),
        ({"train.text_targets": "plan"}, "=plan: dataset .*dataset has no such column of texts; it has .'subtask'."),
        ({"text": True, "scaling.strategy": "fsdp2_reshard"}, "give fsdp2"),
    ],
)
def test_invalid_insulation_options_are_refused(setting, changes, message):
    with pytest.raises(ValueError, match=message):
        resolved(setting, "refused", **changes)
