"""Ten steps of the program against LeRobot's own: its dataset, factories, optimizer, schedule and update."""

import contextlib
import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from lerobot.configs.default import DatasetConfig
from lerobot.configs.train import TrainPipelineConfig
from lerobot.datasets import EpisodeAwareSampler
from lerobot.datasets.factory import make_dataset as lerobots_dataset
from lerobot.optim.factory import make_optimizer_and_scheduler
from lerobot.policies.factory import make_policy, make_pre_post_processors
from lerobot.policies.pi0 import modeling_pi0
from lerobot.processor import tokenizer_processor
from lerobot.scripts.lerobot_train import update_policy
from lerobot.utils.logging_utils import AverageMeter, MetricsTracker

import vla
from tests import in_process
from tests.datasets import make_dataset
from vla_finetuning.flags import parse_args
from vla_finetuning.policies import pipelines
from vla_finetuning.policies.tiny_pi05 import make_tokenizer
from vla_finetuning.run.resolve import resolve

STEPS, ROWS = 10, 2
WORDS = ["go", "to", "the", "red", "blue", "bin"]
# Small, and with a schedule of which ten steps see every part. Of ACT, two rates.
ACT = {
    **{"chunk_size": 4, "n_action_steps": 4, "dim_model": 16, "n_heads": 2, "dim_feedforward": 16},
    **{"n_encoder_layers": 1, "n_vae_encoder_layers": 1, "latent_dim": 4, "pretrained_backbone_weights": "null"},
    **{"optimizer_lr": 1e-4, "optimizer_lr_backbone": 1e-5, "optimizer_weight_decay": 0.1},
}
DIFFUSION = {
    **{"horizon": 8, "n_action_steps": 4, "down_dims": "[8, 16]", "diffusion_step_embed_dim": 8, "n_groups": 4},
    **{"crop_shape": "[40, 40]", "spatial_softmax_num_keypoints": 4, "num_train_timesteps": 10},
    **{"scheduler_warmup_steps": 3, "optimizer_weight_decay": 0.01, "pretrained_backbone_weights": "null"},
}
PI0 = {
    **{"chunk_size": 4, "n_action_steps": 4, "max_state_dim": 8, "max_action_dim": 8, "tokenizer_max_length": 12},
    **{"image_resolution": "[28, 28]", "scheduler_warmup_steps": 3, "scheduler_decay_steps": 7, "optimizer_lr": 1e-4},
}


class Shard:
    """Stands in for Ray's shard of the dataset: the run's own rows, in the plan's order, prepared as they would be."""

    def __init__(self, run):
        self._run, self._data = run, vla.build_dataset(run.rows, run.policy, run.job.checkpoints_dir)

    def iter_torch_batches(self, *, batch_size, collate_fn, **_):
        source = self._data.read(stream=(0, self._run.rows.last_row))
        for rows in source.read_rows(np.arange(self._run.rows.last_row), batch_size):
            yield collate_fn(self._data.prepare(rows))


@contextlib.contextmanager
def tiny_pi0():
    """LeRobot's PI0 with a small vision tower and vocabulary, and a tokenizer that nobody downloads."""
    paligemma, expert = modeling_pi0.PaliGemmaForConditionalGenerationWithPiGemma, modeling_pi0.PiGemmaForCausalLM
    sizes = SimpleNamespace(width=32, depth=2, mlp_dim=32, num_heads=8, num_kv_heads=1, head_dim=8)

    def small(config):
        vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
        for name, value in (*vision.items(), ("patch_size", 14), ("projection_dim", 32)):
            setattr(config.vision_config, name, value)
        config.text_config.vocab_size = config._vocab_size = config.image_token_index = 512
        return paligemma(config)

    def small_expert(config):
        config.vocab_size = 512
        return expert(config)

    tokenizers = SimpleNamespace(from_pretrained=lambda *_, **__: make_tokenizer(WORDS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_pi0, "get_gemma_config", lambda variant: sizes)
        patch.setattr(modeling_pi0, "PaliGemmaForConditionalGenerationWithPiGemma", lambda config: small(config))
        patch.setattr(modeling_pi0, "PiGemmaForCausalLM", lambda config: small_expert(config))
        patch.setattr(tokenizer_processor, "AutoTokenizer", tokenizers)
        patch.setattr(pipelines, "require_model", lambda *_: None)
        yield


KINDS = {"act": (ACT, contextlib.nullcontext), "diffusion": (DIFFUSION, contextlib.nullcontext), "pi0": (PI0, tiny_pi0)}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("as_lerobot") / "dataset"
    return make_dataset(root, episodes=(12, 9, 10), cameras={"observation.images.top": (48, 64)})


def resolved(root, kind, **changes):
    options = {"dataset.root": root, "policy.type": kind, "output_dir": root.parent / kind, "train.mode": "full"}
    options |= {f"policy.{name}": value for name, value in KINDS[kind][0].items()}
    options |= {
        "batch_size": ROWS,
        "steps": STEPS,
        "dataset.image_size": "stored",
        "scaling.use_gpu": "false",
        **changes,
    }
    return resolve(parse_args([f"--{name}={value}" for name, value in options.items()]), gpus_found=0)


def lerobots(run, root, memory_format=torch.contiguous_format):
    """Train as `lerobot-train`: its factories, then its updates. Returns the policy, and the rows that it samples."""
    given = copy.deepcopy(run.policy.config)
    given.input_features, given.output_features, given.push_to_hub = {}, {}, False
    cfg = TrainPipelineConfig(
        dataset=DatasetConfig(repo_id="local/test", root=str(root), video_backend="pyav"), policy=given, steps=STEPS
    )
    cfg.optimizer, cfg.scheduler = given.get_optimizer_preset(), given.get_scheduler_preset()  # as its `validate`
    data = lerobots_dataset(cfg)
    torch.manual_seed(run.config.seed)
    policy = make_policy(cfg=given, ds_meta=data.meta).to(memory_format=memory_format)
    preprocessor, _ = make_pre_post_processors(given, dataset_stats=data.meta.stats)
    optimizer, scheduler = make_optimizer_and_scheduler(cfg, policy)
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    policy, optimizer, scheduler = accelerator.prepare(policy, optimizer, scheduler)
    names = ("loss", "grad_norm", "lr", "update_s", "gpu_mem_gb")
    metrics = MetricsTracker(1, 1, 1, {name: AverageMeter(name) for name in names})
    plan = run.rows.source(stream=(0, run.rows.last_row)).plan
    for step in range(STEPS):
        index = np.concatenate([s.rows()[1] for s in plan.slices(step * ROWS, (step + 1) * ROWS)])
        batch = torch.utils.data.default_collate([data[int(i)] for i in index])
        for key in data.meta.camera_keys:
            batch[key] = batch[key].to(torch.float32) / 255.0
        torch.manual_seed(run.config.seed * 1_000_003 + step)  # what the policy draws, it draws from here
        update_policy(
            metrics,
            policy,
            preprocessor(batch),
            optimizer,
            cfg.optimizer.grad_clip_norm,
            accelerator=accelerator,
            lr_scheduler=scheduler,
        )
    ends = data.meta.episodes["dataset_from_index"], data.meta.episodes["dataset_to_index"]
    drop = getattr(given, "drop_n_last_frames", 0)
    return policy, EpisodeAwareSampler(*ends, drop_n_last_frames=drop).indices


def without_shifts(name, value):
    """Without what a softmax ignores: biases of keys, and of SpatialSoftmax. Their gradients are rounding."""
    if name.endswith("in_proj_bias"):
        query, _, values = value.chunk(3)
        return torch.cat([query, values])
    return value[:0] if name.endswith(("k_proj.bias", "pool.nets.bias")) else value


def relative(a, b):
    """How far `a` is from `b`, of what a softmax does not ignore, by name."""
    apart = {}
    for name in a:
        one, other = (without_shifts(name, tensors[name]).double() for tensors in (a, b))
        apart[name] = ((one - other).norm() / (1 + other.norm())).item()
    return apart


@contextlib.contextmanager
def threads(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)


# Runs of LeRobot that are equal but for the order in which sums are added: without oneDNN's kernels, over other threads
# and with channels last. On no CPU do all of these use the same kernels.
REORDERED = {
    "native": (lambda: torch.backends.mkldnn.flags(enabled=False), torch.contiguous_format),
    "threads": (lambda: threads(1 if torch.get_num_threads() > 1 else 2), torch.contiguous_format),
    "channels last": (contextlib.nullcontext, torch.channels_last),
}


def is_statistic(name):
    """Tell the running statistics of a BatchNorm, sums over all pixels of a batch, from parameters."""
    return name.endswith(("running_mean", "running_var"))


def lerobots_own_difference(run, root, expected):
    """Measure LeRobot against itself with sums in other orders: the largest difference of statistics and parameters.

    Ten steps amplify the rounding of a BatchNorm's statistics.
    """
    own = {True: 0.0, False: 0.0}
    for flags, memory_format in REORDERED.values():
        with flags():
            other = lerobots(run, root, memory_format)[0].state_dict()
        for name, apart in relative(other, expected).items():
            own[is_statistic(name)] = max(own[is_statistic(name)], apart)
    return own


@pytest.mark.parametrize("kind", KINDS)
def test_ten_steps_are_lerobots_own(dataset, kind):
    with KINDS[kind][1]():
        run = resolved(dataset, kind)
        torch.manual_seed(run.config.seed)
        trained = in_process.train(run, Shard(run)).named()
        policy, sampled = lerobots(run, dataset)
        expected = policy.state_dict()
        assert trained.keys() <= expected.keys() and len(trained) > 10
        has_batch_norm = any(isinstance(module, torch.nn.BatchNorm2d) for module in policy.modules())
        own = lerobots_own_difference(run, dataset, expected) if has_batch_norm else {True: 0.0, False: 0.0}
    for name, apart in relative(trained, {name: expected[name] for name in trained}).items():
        assert apart <= 1e-6 + 2 * own[is_statistic(name)], name
    plan = run.rows.source(stream=(0, run.rows.last_row)).plan
    index = np.concatenate([s.rows()[1] for s in plan.slices(0, run.rows.per_epoch)])
    assert sorted(index.tolist()) == sampled
