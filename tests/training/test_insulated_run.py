"""Runs with knowledge insulation: their means over tokens, however micro-batches and workers share a step."""

import numpy as np
import pytest
import torch
from lerobot.policies.factory import get_policy_class, make_pre_post_processors

import vla
from tests import in_process
from tests.datasets import add_subtasks, make_dataset
from tests.in_process import Rank, in_ranks
from tests.tiny import make_base
from util import full_tensor
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.plan.describe import describe
from vla_finetuning.policies.action_tokens import ActionTokenizer
from vla_finetuning.policies.families.insulation import ADAPTED, TOKENS, TOKENS_MASK, InsulatedPI05
from vla_finetuning.policies.family import Chunks
from vla_finetuning.policies.pipelines import tokenizer_step
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.text_targets import TEXT, TEXT_COLUMNS, TEXT_MASK, ends_of_text, with_text
from vla_finetuning.run.push import exported_files
from vla_finetuning.training.checkpoint_writer import CheckpointWriter
from vla_finetuning.training.export import export, exported_checkpoint
from vla_finetuning.training.model import make_prepare

SPARE_WORDS = 270
SUBTASKS = ["reach the red bin", "go_on  "]
# Runs of one worker and of two.
RUNS: dict[str, dict] = {
    "ddp": {"text": True},
    "fsdp2_reshard": {},
    "adapters": {"text": True, "peft.target_modules": ADAPTED},
}


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """A folder with a dataset, a policy for it, and a tokenizer of actions."""
    folder = tmp_path_factory.mktemp("insulated")
    root = make_dataset(folder / "dataset", episodes=(12, 9, 10))
    add_subtasks(root, lambda index: index % 3 - 1, SUBTASKS)
    meta = load_metadata(root)
    tasks = [with_text(task, text.replace("_", " ")) for task in meta.tasks.values() for text in SUBTASKS]
    base = make_base(folder / "base", meta, tasks=tasks, spare_words=SPARE_WORDS, **in_process.TINY)
    chunks = np.random.default_rng(0).normal(size=(50, 10, 4)).cumsum(axis=1).clip(-1, 1)
    ActionTokenizer.fit(chunks, SPARE_WORDS - 2).save(folder / "tokenizer")
    return folder, root, base


def resolved(setting, name, **changes):
    options = {"train.knowledge_insulation": "true", "train.action_tokenizer": setting[0] / "tokenizer"}
    options = {} if changes.pop("plain", False) else options
    options |= {"train.text_targets": "subtask"} if changes.pop("text", False) else {}
    options |= {"batch_size": 4, "grad_accum": 1, "lr": 1e-3, "output_dir": setting[0] / name, **changes}
    return in_process.resolved(setting, **options)


class Shard(in_process.RunRows):
    """A rank's batches of rows that have 1 to 7 action tokens and 0 to 16 of text, by their position."""

    def iter_torch_batches(self, *, collate_fn, **options):
        def collate(rows):
            columns = rows[TOKENS].shape[1]
            tokens = np.stack([np.random.default_rng(p).integers(0, 200, columns) for p in rows["position"]])
            mask = np.arange(columns) <= rows["position"][:, None] % 7
            rows = {**rows, TOKENS: tokens, TOKENS_MASK: mask}
            if TEXT in rows:
                texts = [np.random.default_rng(p).integers(0, 200, TEXT_COLUMNS + 1) for p in rows["position"]]
                mask = np.arange(TEXT_COLUMNS) < rows["position"][:, None] % 5 * 4
                rows |= {TEXT: np.stack(texts), TEXT_MASK: mask}
            return collate_fn(rows)

        return super().iter_torch_batches(collate_fn=collate, **options)


def trained(run, rank=0, world=1):
    tensors = in_process.train(run, worker=Rank(rank, world, Shard(run, rank, world))).named()
    return {name: full_tensor(tensor) for name, tensor in tensors.items()}


def apart(found, expected):
    """How far weights are from others, but for biases of keys, whose gradients are rounding alone."""
    assert found.keys() == expected.keys() and len(found) > 10
    names = [name for name in found if "k_proj.bias" not in name]
    return max(((found[name] - expected[name]).norm() / (1 + expected[name].norm())).item() for name in names)


@pytest.fixture(scope="module")
def whole(setting):
    """The weights of each run with one worker and one micro-batch a step, and a file of them."""
    weights = {name: trained(resolved(setting, f"whole-{name}", **changes)) for name, changes in RUNS.items()}
    assert all("lora_" in name for name in weights["adapters"])
    torch.save(weights, file := setting[0] / "whole.pt")
    return weights, file


def test_two_micro_batches_with_unequal_tokens_are_one(setting, whole):
    halves = resolved(setting, "halves", text=True, batch_size=2, grad_accum=2)
    assert apart(trained(halves), whole[0]["ddp"]) < 5e-6


def in_rank(rank, world, setting, file):
    expected, found = torch.load(file), {}
    for name, changes in RUNS.items():
        strategy = name if name == "fsdp2_reshard" else "ddp"
        options = {"batch_size": 2, "scaling.num_workers": world, "scaling.strategy": strategy, **changes}
        weights = trained(resolved(setting, f"{rank}-{name}", **options), rank, world)
        found[name] = apart(weights, expected[name])
    return found


def test_two_workers_with_unequal_tokens_equal_one(setting, whole):
    for found in in_ranks(in_rank, setting, whole[1], world=2):
        assert found.keys() == RUNS.keys() and max(found.values()) < 5e-6, found


def test_the_plan_counts_the_work_and_rows_carry_tokens(setting):
    run, plain = resolved(setting, "planned"), resolved(setting, "plain", plain=True)
    assert "(--train.mode full, insulated)" in describe(run)
    told = [resolved(setting, "told", **{"peft.target_modules": ADAPTED, **more}) for more in ({}, {"text": True})]
    # A run with adapters is not resumed with another loss either.
    assert [run.job.start.mode.partition("_proj), ")[2] for run in told] == ["insulated", "insulated, writes subtask"]
    assert run.policy.parameters.trainable > plain.policy.parameters.trainable
    longest = max(run.policy.prompts)
    assert run.policy.flops_by_prompt[longest] > 1.05 * plain.policy.flops_by_prompt[longest]
    columns = vla.build_dataset(run)
    row = columns.prepare(columns.read(stream=(0, run.rows.last_row)).example())
    tokenizer = ActionTokenizer.load(setting[0] / "tokenizer")
    count = int(row[TOKENS_MASK].sum())
    assert row[TOKENS][0, :count].tolist() == [*tokenizer.encode(row["action"])[0], tokenizer.vocabulary]


def written(run, columns):
    """The texts that rows are to write."""
    preprocessor, _ = run.policy.processors()
    tokenizer, texts = tokenizer_step(preprocessor).input_tokenizer, []
    for tokens, mask in zip(columns[TEXT], columns[TEXT_MASK], strict=True):
        ids = tokens[1:][mask]
        assert not len(ids) or (tokens[0], ids[-1]) == ends_of_text(tokenizer)
        texts.append(tokenizer.decode(ids[:-1]))
    return texts


def test_prompts_of_every_second_row_say_the_subtask_and_the_others_are_to_write_it(setting):
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
    saying = plain({**rows, "task": np.array(instructions, object)})["observation.language.tokens"]
    nothing = plain(rows)["observation.language.tokens"]
    assert (saying[1] != nothing[1]).any()
    assert np.array_equal(unplaced["observation.language.tokens"], nothing)
    expected = np.where(np.arange(6)[:, None] % 2 == 1, saying, nothing)
    assert np.array_equal(placed["observation.language.tokens"], expected)
    assert all(np.array_equal(placed[key], plain(rows)[key]) for key in (TOKENS, TOKENS_MASK, "action"))


@pytest.mark.parametrize(("text", "error"), [
    ("red " * TEXT_COLUMNS, "has 32 tokens, more than 31: shorten it"),
    ("reach the purple bin", "the policy's tokenizer lacks a word of 'reach the purple bin': name a policy"),
], ids=["too long", "of an unknown word"])  # fmt: skip
def test_a_text_that_cannot_be_written_is_refused(setting, text, error):
    run = resolved(setting, "long", text=True)
    (rows,) = run.rows.in_stored_order().read_rows([1], 1)
    rows["subtask"] = np.array([text], object)
    with pytest.raises(ValueError, match=error):
        make_prepare(run.policy, run.rows)(rows)


def test_a_run_goes_on_with_the_tokenizer_that_it_began_with(setting, tmp_path):
    chunks = np.random.default_rng(1).normal(size=(50, 10, 4)).cumsum(axis=1).clip(-1, 1)
    sample = [Chunks(chunks, np.zeros(4), np.ones(4), tuple("abcd"))]
    begun = InsulatedPI05("pi05", vocabulary=SPARE_WORDS - 2).fit_to_rows(lambda: sample, tmp_path)
    assert begun.action_tokenizer == ActionTokenizer.fit(chunks, SPARE_WORDS - 2)
    assert InsulatedPI05("pi05").fit_to_rows(lambda: pytest.fail("read again"), tmp_path) == begun
    lines = InsulatedPI05("pi05", vocabulary=SPARE_WORDS - 8).describe_chunks(lambda: sample, tmp_path)
    assert f"as {SPARE_WORDS - 2} tokens" in lines[0] and "before its first step" not in " ".join(lines)
    other = InsulatedPI05("pi05", action_tokenizer=ActionTokenizer.load(setting[0] / "tokenizer"))
    with pytest.raises(ValueError, match="has the tokenizer that this run was started with"):
        other.fit_to_rows(lambda: sample, tmp_path)


def family_from(setting, policy, tokenizer):
    run = resolved(setting, "next", **{"policy.path": policy, "train.action_tokenizer": tokenizer})
    return family_of(run.policy.config)


def test_a_policy_is_exported_with_its_tokenizer_and_later_runs_use_it(setting):
    run = resolved(setting, "exported", steps=1)
    in_process.train(run, worker=in_process.alone(run), make_checkpoints=CheckpointWriter)
    export(run.policy, exported_checkpoint(run.job, best=False), run.job.output_dir)
    folder = run.job.output_dir / "pretrained_model"

    tokenizer = ActionTokenizer.load(setting[0] / "tokenizer")
    assert family_from(setting, folder, None).action_tokenizer == tokenizer
    assert family_from(setting, folder, "fit").action_tokenizer is None
    assert family_from(setting, setting[2], None).action_tokenizer is None
    next_base = resolved(setting, "next", plain=True, **{"policy.path": folder}).policy.base
    assert next_base["files"].keys() - run.policy.base["files"].keys() == {
        f"action_tokenizer/{name}.json" for name in ("tokenizer", "processor_config")
    } | {"robot.json"}

    files, others = exported_files(folder)
    assert {"action_tokenizer/tokenizer.json", "action_tokenizer/processor_config.json"} < set(files) and not others
    policy = get_policy_class(run.policy.config.type).from_pretrained(folder)
    before, after = make_pre_post_processors(policy.config, pretrained_path=str(folder))
    seen = {key: torch.rand(1, *feature.shape) for key, feature in policy.config.input_features.items()}
    action = after(policy.select_action(before({**seen, "task": "go to the red bin"})))
    assert action.shape == (1, *policy.config.output_features["action"].shape)

    (folder / "action_tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="is no action tokenizer"):
        family_from(setting, folder, None)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"train.mode": "expert"}, "--train.mode=full"),
        ({"train.mask_padding": "true"}, "the tokens of a chunk are of all of its steps"),
        ({"peft.method_type": "lora"}, "the language model has no adapter that could learn from tokens"),
        ({"train.action_tokenizer": "/nowhere"}, "no folder, and the Hub gives none of that name"),
        ({"plain": True, "train.flow_weight": 2}, "does nothing without"),
        ({"plain": True, "text": True}, "--train.knowledge_insulation"),
        ({"train.text_targets": "plan"}, "no such column of texts; it has .'subtask'."),
        ({"text": True, "scaling.strategy": "fsdp2_reshard"}, "give fsdp2"),
    ],
)
def test_what_cannot_be_is_refused(setting, changes, message):
    with pytest.raises(ValueError, match=message):
        resolved(setting, "refused", **changes)
