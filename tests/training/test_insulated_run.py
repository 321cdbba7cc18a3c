"""Runs with knowledge insulation: their means over tokens, however micro-batches and workers share a step."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from lerobot.policies.factory import get_policy_class, make_pre_post_processors

import vla
from tests import in_process
from tests.datasets import make_dataset
from tests.in_process import Rank
from tests.tiny import make_base
from util import full_tensor
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.plan.describe import describe
from vla_finetuning.plan.robot_facts import robot_facts
from vla_finetuning.policies.action_tokens import ActionTokenizer
from vla_finetuning.policies.families.insulation import TOKENS, TOKENS_MASK, InsulatedPI05
from vla_finetuning.policies.family import Chunks
from vla_finetuning.policies.registry import family_of
from vla_finetuning.run.push import exported_files
from vla_finetuning.training.checkpoint_writer import CheckpointWriter
from vla_finetuning.training.export import export, exported_checkpoint

SPARE_WORDS = 270


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """A folder with a dataset, a policy for it, and a tokenizer of actions."""
    folder = tmp_path_factory.mktemp("insulated")
    root = make_dataset(folder / "dataset", episodes=(12, 9, 10))
    base = make_base(folder / "base", load_metadata(root), spare_words=SPARE_WORDS, **in_process.TINY)
    chunks = np.random.default_rng(0).normal(size=(50, 10, 4)).cumsum(axis=1).clip(-1, 1)
    ActionTokenizer.fit(chunks, SPARE_WORDS - 2).save(folder / "tokenizer")
    return folder, root, base


def resolved(setting, name, **changes):
    options = {"train.knowledge_insulation": "true", "train.action_tokenizer": setting[0] / "tokenizer"}
    options = {} if changes.pop("plain", False) else options
    options |= {"batch_size": 4, "grad_accum": 1, "lr": 1e-3, "output_dir": setting[0] / name, **changes}
    return in_process.resolved(setting, **options)


class Shard(in_process.RunRows):
    """A rank's batches of rows that have 1 to 7 action tokens, by their position."""

    def iter_torch_batches(self, *, collate_fn, **options):
        def collate(rows):
            columns = rows[TOKENS].shape[1]
            tokens = np.stack([np.random.default_rng(p).integers(0, 200, columns) for p in rows["position"]])
            mask = np.arange(columns) <= rows["position"][:, None] % 7
            return collate_fn({**rows, TOKENS: tokens, TOKENS_MASK: mask})

        return super().iter_torch_batches(collate_fn=collate, **options)


def trained(run, rank=0, world=1):
    tensors = in_process.train(run, worker=Rank(rank, world, Shard(run, rank, world))).named()
    return {name: full_tensor(tensor) for name, tensor in tensors.items()}


def apart(found, expected):
    """How far weights are from others, but for biases of keys, whose gradients are rounding alone."""
    assert found.keys() == expected.keys() and len(found) > 10
    names = [name for name in found if "k_proj.bias" not in name]
    return max(((found[name] - expected[name]).norm() / (1 + expected[name].norm())).item() for name in names)


def test_two_micro_batches_with_unequal_tokens_are_one(setting):
    whole = trained(resolved(setting, "whole"))
    assert apart(trained(resolved(setting, "halves", batch_size=2, grad_accum=2)), whole) < 1e-6


def both(rank, world, setting):
    alone, found = trained(resolved(setting, f"{rank}-alone")), {}
    for strategy in ("ddp", "fsdp2_reshard"):
        options = {"batch_size": 2, "scaling.num_workers": world, "scaling.strategy": strategy}
        found[strategy] = apart(trained(resolved(setting, f"{rank}-{strategy}", **options), rank, world), alone)
    return found


def test_two_workers_with_unequal_tokens_equal_one(setting):
    for found in in_process.in_ranks(both, setting, world=2):
        assert found.keys() == {"ddp", "fsdp2_reshard"} and max(found.values()) < 1e-6, found


def test_the_plan_counts_the_work_and_rows_carry_tokens(setting):
    run, plain = resolved(setting, "planned"), resolved(setting, "plain", plain=True)
    assert "(--train.mode full, insulated)" in describe(run)
    assert run.policy.parameters.trainable > plain.policy.parameters.trainable
    longest = max(run.policy.prompts)
    assert run.policy.flops_by_prompt[longest] > 1.05 * plain.policy.flops_by_prompt[longest]
    columns = vla.build_dataset(run)
    row = columns.prepare(columns.read(stream=(0, run.rows.last_row)).example())
    tokenizer = ActionTokenizer.load(setting[0] / "tokenizer")
    count = int(row[TOKENS_MASK].sum())
    assert row[TOKENS][0, :count].tolist() == [*tokenizer.encode(row["action"])[0], tokenizer.vocabulary]


def test_a_run_goes_on_with_the_tokenizer_that_it_began_with(setting, tmp_path):
    chunks = np.random.default_rng(1).normal(size=(50, 10, 4)).cumsum(axis=1).clip(-1, 1)
    sample = [Chunks(chunks, np.zeros(4), np.ones(4), tuple("abcd"))]
    begun = InsulatedPI05("pi05", vocabulary=SPARE_WORDS - 2).fit_to_rows(lambda: sample, tmp_path)
    assert begun.action_tokenizer == ActionTokenizer.fit(chunks, SPARE_WORDS - 2)
    assert InsulatedPI05("pi05").fit_to_rows(lambda: pytest.fail("read again"), tmp_path) == replace(
        begun, vocabulary=0
    )
    other = InsulatedPI05("pi05", action_tokenizer=ActionTokenizer.load(setting[0] / "tokenizer"))
    with pytest.raises(ValueError, match="has the tokenizer that this run was started with"):
        other.fit_to_rows(lambda: sample, tmp_path)


def family_from(setting, policy, tokenizer):
    run = resolved(setting, "next", **{"policy.path": policy, "train.action_tokenizer": tokenizer})
    return family_of(run.policy.config)


def test_a_policy_is_exported_with_its_tokenizer_and_later_runs_use_it(setting):
    run = resolved(setting, "exported", steps=1)
    in_process.train(run, worker=in_process.alone(run), make_checkpoints=CheckpointWriter)
    export(run.policy, exported_checkpoint(run.job, best=False), run.job.output_dir, {}, robot_facts(run))
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
        ({"peft.method_type": "lora"}, "adapters leave as it is"),
        ({"train.action_tokenizer": "/nowhere"}, "no folder, and the Hub gives none of that name"),
        ({"plain": True, "train.flow_weight": 2}, "does nothing without"),
    ],
)
def test_what_cannot_be_is_refused(setting, changes, message):
    with pytest.raises(ValueError, match=message):
        resolved(setting, "refused", **changes)
