"""Options of the training step, the loss, augmentation, and the average of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vla_finetuning.options.dataset import ImageTransformOptions
from vla_finetuning.options.fields import option

TrainMode = Literal["heads", "expert", "full"]
Attention = Literal["eager", "sdpa"]
Precision = Literal["auto", "fp32", "bf16"]

# Options of --train that only some policies' losses support.
LOSS_OPTIONS = (
    *("mask_padding", "exact_mean", "noise_draws", "attention", "activation_checkpointing", "compile"),
    "knowledge_insulation",
)
# Flags of a run that trains the texts of a column, which follows.
TEXT_FLAGS = "--train.mode full --train.knowledge_insulation true --train.text_targets"
# Words for 512 action tokens, their start and their end.
ACTION_WORDS = 514


@dataclass
class StepOptions:
    """Training step."""

    mode: TrainMode = option(
        "expert",
        "Trained parameters: the action projections (heads), the whole action expert, or everything that the loss can "
        "reach (full).",
    )
    precision: Precision = option(
        "auto",
        "auto: bf16 autocast on GPUs that support it, otherwise fp32; for act, diffusion, vqbet and multi_task_dit "
        "fp32 as in LeRobot, unless --policy.use_amp. Trained weights are always fp32.",
    )
    attention: Attention = option(
        "sdpa",
        "Attention of PI0.5, PI0 and SmolVLA: PyTorch's fused kernels (sdpa), or LeRobot's own code (eager), which "
        "stores the attention weights. Equal up to rounding.",
    )
    activation_checkpointing: bool = option(
        False,
        "PI0.5, PI0, SmolVLA: store only the inputs of each layer, and recompute the layer in backward. Same result, "
        "less memory, slower.",
    )
    compile: bool = option(
        False,
        "PI0.5, PI0, SmolVLA: torch.compile the layers, on GPUs that support it, before the first step, for every "
        "length of prompts. Equal up to rounding.",
    )
    deterministic: bool = option(False, "Use only deterministic kernels: runs repeat bit for bit.")
    max_nonfinite: int = option(
        10,
        "Skip steps whose loss or gradient is not finite, and end the run after more than this many.",
        min=0,
    )


@dataclass
class TrainOptions(StepOptions):
    """Training step and augmentation."""

    # "openpi": a resized crop of 0.95, a rotation of up to 5 degrees, brightness, contrast and saturation.
    augmentation: Literal["none", "openpi"] = option(
        "none",
        "Augment training frames as openpi does: crop, rotation and colours; only colours for cameras with `wrist` in "
        "their name. The alternative is --dataset.image_transforms.enable.",
    )
    # By default padded steps count, as in LeRobot's PI0.5 and openpi.
    mask_padding: bool = option(False, "Leave padded action steps out of the loss.")
    pad_loss: Literal["own", "lerobot"] = option(
        "own",
        "With several robots. own: a row's loss is the mean over its robot's action dimensions. lerobot: over the "
        "widest robot's, as the policy itself counts padding.",
    )
    # Two workers then equal one worker with twice the batch, if the policy draws noise by row.
    exact_mean: bool = option(
        False,
        "ACT, SmolVLA, PI0-FAST: divide the loss by the valid action steps or tokens of the whole step, whose "
        "micro-batches are then in memory at once. false: each worker's micro-batch by its own, as lerobot-train "
        "does.",
        conflicts={"sample_weighting.type=rabc": "losses are then means over rows, so it has no effect"},
    )
    # More draws estimate the same loss with less variance.
    noise_draws: int = option(
        1,
        "PI0.5, PI0, SmolVLA: number of draws of noise and time for each row. All draws share one pass of images and "
        "language; a batch still has batch_size rows.",
        min=1,
    )
    # arXiv 2505.23705. The loss is a mean over the tokens of the whole step, as with exact_mean.
    knowledge_insulation: bool = option(
        False,
        "PI0.5: train the backbone on action tokens by cross-entropy, and the action expert on the flow, whose "
        "gradients do not reach the backbone.",
        requires={"train.mode=full": "the backbone is to learn from action tokens"},
        conflicts={"train.mask_padding": "action tokens encode the whole chunk, so single steps cannot be left out"},
    )
    flow_weight: float = option(
        1.0,
        "With --train.knowledge_insulation: factor of the flow loss, beside the cross-entropy.",
        above=0,
        only_with="train.knowledge_insulation",
    )
    action_tokenizer: str = option(
        "auto",
        "With --train.knowledge_insulation: the FAST tokenizer, a folder or a Hub id, read as data. fit: learn one "
        "from the run's rows before the first step. auto: use the policy's tokenizer, or fit one.",
        file="name",
        only_with="train.knowledge_insulation",
    )
    # PI0.5 (arXiv 2504.16054) writes the subtask first and then acts on it.
    text_targets: str | None = option(
        None,
        "With --train.knowledge_insulation: a text column of the dataset, such as subtask, that the backbone learns "
        "to write and to act on (evaluate.py --policy.subtask true).",
        requires={"train.knowledge_insulation": "the backbone is to learn from tokens"},
        conflicts={
            "scaling.strategy=fsdp2_reshard": "the head of texts is the whole embedding of words, which that strategy "
            "gives up after each use; give fsdp2"
        },
    )

    @property
    def averages_step(self) -> bool:
        """Return whether the loss is a mean over the whole step, which keeps all of its micro-batches in memory."""
        return self.exact_mean or self.knowledge_insulation

    @property
    def spare_words(self) -> int:
        """Return the number of words for action tokens in the vocabulary of a policy that is made for the run."""
        return ACTION_WORDS if self.knowledge_insulation else 0

    @property
    def insulation(self) -> str:
        """Describe what the backbone learns; "" without knowledge insulation."""
        writes = f", writes {self.text_targets}" if self.text_targets else ""
        return ", insulated" * self.knowledge_insulation + writes

    def describe_augmentation(self, transforms: ImageTransformOptions, wrist: Sequence[str]) -> list[str]:
        """Return the plan's lines on augmentation. `wrist` names the cameras with changes of colour only."""
        draw = "drawn for each camera of each row anew in every epoch, on the device"
        if transforms.enable:
            names = [name for name, entry in transforms.tfs.items() if float(entry.get("weight", 1)) > 0]
            most = min(transforms.max_num_transforms, len(names) or transforms.max_num_transforms)
            return [f"Augmented    by {most} of the transforms {', '.join(names) or "LeRobot's"}; {draw}"]
        if self.augmentation == "openpi":
            only = f"; only the colours of {', '.join(wrist)}" if wrist else "; no camera has 'wrist' in its name"
            return [f"Augmented    as in openpi: crop, turn, brightness, contrast, saturation{only}; {draw}"]
        return []


@dataclass
class EmaOptions:
    """An exponential moving average of the weights that train, fp32 (lerobot-train has none; openpi does)."""

    enable: bool = option(False, "Average the trained weights. --ema.decay implies it.")
    # openpi's default; its LIBERO recipe has 0.999.
    decay: float = option(
        0.99, "Decay of the average per step: 0.99 averages about the last 100 steps.", above=0, below=1
    )

    def describe(self) -> list[str]:
        """Return the plan's lines on the average."""
        if not self.enable:
            return []
        steps = 1 / (1 - self.decay)
        return [
            f"Average      of the weights that train, about the last {steps:.0f} steps: it is measured and exported"
        ]
