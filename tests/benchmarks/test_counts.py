"""What a step issues and keeps stays what it is: at a tiny size in every run, at the real one when asked."""

from pathlib import Path

import pytest

from benchmarks import counts
from tests.tiny import make_config
from vla_finetuning.files import read_json
from vla_finetuning.training.memory import step_memory

RESULTS = sorted((Path(counts.__file__).parent / "results").glob("counts-*.json"))


def kept(prompt):
    """Bytes that the forward of a row leaves for backward; full, under autocast."""
    config = make_config(1)
    config.tokenizer_max_length = prompt
    options = {"cameras": 1, "batch_size": 1, "grad_accum": 1, "draws": 1, "bf16": True, "attention": "sdpa"}
    return step_memory(config, "full", **options, checkpointing=False).saved


def test_backward_has_of_a_token_each_tensor_once_and_no_more_than_it_needs():
    """Of the tiny language model's token, whose layers are like those of the real one."""
    config, fp32, bf16 = make_config(1), 4, 2
    width, head, heads = config.width, config.head_dim, 8
    norm = 2 * width * fp32 + fp32  # what it reads, that in its result's scale (not on CUDA), and the scale
    layer = (
        2 * (norm + width * bf16)  # and its result as the products read it, once for three and for two of them
        + (heads + 2) * head * bf16  # queries, and the one head of keys and values
        + heads * (head * bf16 + fp32)  # what attention returns, which a product reads, and the logarithms of its sums
        + 2 * config.mlp_dim * bf16  # of the perceptron's four
    )
    # Of the last layer what makes keys and values; in each of the expert's, keys and values in front of its own.
    last, expert = norm + width * bf16, config.depth * 2 * head * bf16
    rotation, masks = 2 * head * bf16, 16
    expected = (config.depth - 1) * layer + last + expert + rotation + masks
    assert (kept(48) - kept(16)) / 32 == pytest.approx(expected, rel=0.02)


@pytest.mark.slow  # two steps of the real size
def test_the_real_step_issues_and_keeps_no_more_than_was_counted():
    known = read_json(RESULTS[-1])["modes"]["full"]
    found = counts.count("full")
    assert found["kept_bytes_per_image_token"] <= known["kept_bytes_per_image_token"]
    assert sum(found["operations"].values()) <= sum(known["operations"].values())
