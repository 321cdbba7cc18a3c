"""Define the contenders of benchmarks/step.py, each of which trains a policy with random weights on synthetic rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.policies.factory import get_policy_class
from lerobot.policies.pretrained import PreTrainedPolicy

from util import DeviceMetrics, NumpyToTorchCollate, cuda_prefetcher, train_step
from vla_finetuning.options.programs import Config
from vla_finetuning.options.train import Precision, TrainMode, TrainOptions
from vla_finetuning.policies.compiling import why_not
from vla_finetuning.policies.matching import FeatureMatch
from vla_finetuning.policies.optim import make_recipe
from vla_finetuning.policies.processors import to_float
from vla_finetuning.policies.prompts import cut_prompts
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.spec import PolicySpec, Robot
from vla_finetuning.policies.trainable import choose_trainable
from vla_finetuning.training.model import build_model, build_optimizer, check_attention

# Policy to measure, options of its tiny size, and size of the tiny vocabulary; set by benchmarks/step.py.
TINY = {"image_resolution": (56, 56), "tokenizer_max_length": 64, "chunk_size": 10, "n_action_steps": 10}
measured: dict[str, Any] = {"policy": "pi05", "options": TINY, "vocabulary": None}
Columns = dict[str, np.ndarray]

CAMERAS, STATE_DIM, ACTION_DIM = 3, 8, 7
MAX_STEPS = 300
LR = 1e-4


def policy_config(device: torch.device) -> Any:
    """Return the configuration of the policy in `measured`, with its real size on a GPU and tiny on a CPU."""
    tiny = device.type != "cuda"
    kind = "tiny_pi05" if tiny and measured["policy"] == "pi05" else measured["policy"]
    options: dict[str, Any] = measured["options"] if tiny else {}
    side, _ = options.get("image_resolution") or options.get("resize_imgs_with_padding") or (224, 224)
    image = PolicyFeature(FeatureType.VISUAL, (3, side, side))
    make: Any = PreTrainedConfig.get_choice_class(kind)
    inputs = {f"observation.images.{i}": image for i in range(CAMERAS)}
    inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (STATE_DIM,))
    outputs = {"action": PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))}
    return make(**options, input_features=inputs, output_features=outputs, device=device.type)


def make_policy(config: Any, mode: TrainMode, device: torch.device) -> PreTrainedPolicy:
    """Make a policy whose random weights are always the same."""
    torch.manual_seed(0)
    with device:
        policy = get_policy_class(config.type)(config)
    choose_trainable(policy, mode)
    return policy.train()


def prepared_rows(config: Any, rows: int, seed: int) -> Columns:
    """Make a batch as the data engine delivers it: uint8 cameras (B, H, W, 3), padded tokens, action chunks."""
    random = np.random.default_rng(seed)
    tokens = (rows, config.tokenizer_max_length)
    vocabulary = measured["vocabulary"] or getattr(config, "vocab_size", 257_152)
    columns: Columns = {
        key: random.integers(0, 256, (rows, *image.shape[1:], 3), np.uint8)
        for key, image in config.image_features.items()
    }
    columns["observation.language.tokens"] = random.integers(0, vocabulary, tokens)
    lengths = random.integers(tokens[1] // 4, tokens[1] // 2, (rows, 1))
    lengths[0] = tokens[1] // 2  # cuts all batches to the same length
    columns["observation.language.attention_mask"] = np.arange(tokens[1]) < lengths
    if getattr(family_of(config), "before_actions", 0):
        columns["observation.state"] = random.standard_normal((rows, STATE_DIM), np.float32)
    columns["action"] = random.standard_normal((rows, config.chunk_size, ACTION_DIM), np.float32)
    columns["action_is_pad"] = np.zeros((rows, config.chunk_size), bool)
    return columns


def prompt_lengths(config: Any) -> tuple[int, ...]:
    """Return the lengths to which our step cuts prompts."""
    return family_of(config).prompt_lengths(config, CAMERAS)


def prompt(config: Any) -> int:
    """Return the length to which our step cuts the prompts of `prepared_rows`."""
    return next(n for n in prompt_lengths(config) if n >= config.tokenizer_max_length // 2)


class NotCompiledError(RuntimeError):
    """Layers that should be compiled did not run as compiled code in every step."""


@dataclass(frozen=True)
class Prepared(PolicySpec):
    """Policy of a run with prepared rows and random weights, which are made on the device."""

    device: torch.device = torch.device("cpu")

    def start(self) -> PreTrainedPolicy:
        return make_policy(self.config, self.train.mode, self.device)

    def processors(self, config: PreTrainedConfig | None = None) -> Any:
        return None, None


class Contender:
    """A training step of a policy, on batches in the form that its own loader delivers."""

    def feed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches on the device."""
        return batches

    def finish(self) -> None:
        """Do the work of a log step."""


class Naive(Contender):
    """The loop of the Anyscale template before its speed-up, with GradScaler and plain AdamW."""

    def __init__(self, config: Any, mode: TrainMode, device: torch.device, bf16: bool):
        self.policy, self.device = make_policy(config, mode, device), device
        trained = [p for p in self.policy.parameters() if p.requires_grad]
        constants = {name: getattr(config, f"optimizer_{name}") for name in ("betas", "eps", "weight_decay")}
        self.optimizer = torch.optim.AdamW(trained, lr=LR, **constants)
        self.clip_norm = config.optimizer_grad_clip_norm
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
        self.scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")

    def stored(self, columns: Columns) -> Any:
        """Return rows with float32 images in pageable memory."""
        images = {key: to_float(torch.from_numpy(v)).numpy() for key, v in columns.items() if v.dtype == np.uint8}
        return columns | images

    def step(self, batches: Iterator[Any], accum: int, number: int) -> float:
        total = 0.0
        for _ in range(accum):
            batch = {key: torch.tensor(value).to(self.device) for key, value in next(batches).items()}
            with self.autocast:
                loss, _ = self.policy.forward(batch)
            self.scaler.scale(loss / accum).backward()
            total += loss.item()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_([p for p in self.policy.parameters() if p.requires_grad], self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return total / accum


class LeRobot(Contender):
    """LeRobot's `update_policy` and optimizer preset through accelerate, with bfloat16 weights on a GPU."""

    def __init__(self, config: Any, mode: TrainMode, device: torch.device, bf16: bool):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
        from lerobot.utils.logging_utils import AverageMeter, MetricsTracker

        config.dtype = "bfloat16" if bf16 else "float32"
        policy = make_policy(config, mode, device)
        preset = config.get_optimizer_preset()
        preset.lr, self.clip_norm, self.device = LR, preset.grad_clip_norm, device
        AcceleratorState._reset_state(reset_partial_state=True)  # the state keeps the first precision
        self.accelerator = Accelerator(
            step_scheduler_with_optimizer=False, mixed_precision="bf16" if bf16 else "no", cpu=device.type == "cpu"
        )
        trained = [p for p in policy.parameters() if p.requires_grad]
        self.policy, self.optimizer = self.accelerator.prepare(policy, preset.build(trained))
        names = ("loss", "grad_norm", "lr", "update_s", "gpu_mem_gb")
        self.metrics = MetricsTracker(1, 1, 1, {name: AverageMeter(name) for name in names})

    def stored(self, columns: Columns) -> Any:
        """Return rows with uint8 images (B, 3, H, W) in pinned memory, as a DataLoader delivers them."""
        images = {key: v.transpose(0, 3, 1, 2).copy() for key, v in columns.items() if v.dtype == np.uint8}
        tensors = {key: torch.from_numpy(value) for key, value in (columns | images).items()}
        return {k: v.pin_memory() for k, v in tensors.items()} if self.device.type == "cuda" else tensors

    def feed(self, batches: Iterator[Any]) -> Iterator[Any]:
        from accelerate.utils import send_to_device

        for batch in batches:
            yield send_to_device(batch, self.device)

    def step(self, batches: Iterator[Any], accum: int, number: int) -> float:
        from lerobot.scripts.lerobot_train import update_policy

        # lerobot_train's loop converts images before its preprocessor.
        batch = {k: v.to(torch.float32) / 255.0 if v.dtype == torch.uint8 else v for k, v in next(batches).items()}
        update_policy(self.metrics, self.policy, batch, self.optimizer, self.clip_norm, self.accelerator)
        return self.metrics.loss.val


class Ours(Contender):
    """Our step as in a training worker, on one GPU."""

    def __init__(self, config: Any, mode: TrainMode, device: torch.device, bf16: bool, *, compiled: bool = False):
        precision: Precision = "bf16" if bf16 else "fp32"
        run = Config(train=TrainOptions(mode=mode, precision=precision, attention="sdpa", compile=compiled))
        spec = Prepared(
            config=config,
            folder=None,
            base={},
            train=run.train,
            adapters=run.peft,
            recipe=replace(make_recipe(run, config), peak=LR, scheduler=None, cosine_shares=None),
            robots=(Robot("", config, FeatureMatch(tuple(config.image_features), (), {})),),
            seed=0,
            prompts=prompt_lengths(config),
            device=device,
        )
        self.loss, self.autocast = build_model(spec, device)
        self.config, self.device, self.compiler = config, device, getattr(self.loss, "compiler", None)
        if compiled and self.compiler is None:
            raise NotCompiledError(str(why_not(device)))
        check_attention(spec, self.loss, device, self.autocast)
        self.optimizer = build_optimizer(spec, self.loss, MAX_STEPS)
        self.collate = NumpyToTorchCollate(pin_memory=device.type == "cuda")
        self.metrics = DeviceMetrics(device)

    def stored(self, columns: Columns) -> Any:
        return self.collate(cut_prompts(columns, prompt_lengths(self.config)))

    def feed(self, batches: Iterator[Any]) -> Iterator[Any]:
        return cuda_prefetcher(batches, self.device)

    def step(self, batches: Iterator[Any], accum: int, number: int) -> torch.Tensor:
        first = next(batches)
        rows = len(first["action"])
        draws = family_of(self.config).draw(self.config, rows * accum, 0, number, self.device)
        noise, flow_time = (draw.split(rows) for draw in draws if draw is not None)
        options: dict[str, Any] = {"grad_accum": accum, "mean_over": accum, "autocast": self.autocast}
        options |= {"device": self.device, "draws": lambda micro: (noise[micro], flow_time[micro])}
        result = train_step(self.loss, self.optimizer, itertools.chain([first], batches), step=number, **options)
        self.metrics.add_step(result, rows * accum)
        return result.loss

    def finish(self) -> None:
        self.metrics.gather({"waited_s": 0.0})
        self.metrics.restart()


CONTENDERS: dict[str, Callable[..., Any]] = {"naive": Naive, "lerobot": LeRobot, "ours": Ours}
