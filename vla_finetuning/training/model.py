"""Build the model, the optimizer and the preprocessing of a training process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from util import TrainableOptimizer, take_optimizer
from vla_finetuning.options.recap import ADVANTAGE, LABEL_DROPOUT
from vla_finetuning.plan.rows import Rows
from vla_finetuning.policies.attention import choose_kernel
from vla_finetuning.policies.augment import make_augmentation
from vla_finetuning.policies.compiling import Compiler, why_not
from vla_finetuning.policies.family import PolicyLoss
from vla_finetuning.policies.flow import FlowLoss
from vla_finetuning.policies.pipelines import tokenizer_step, without_state
from vla_finetuning.policies.processors import DeviceHalf, Prepare, PreparedRobot, PrepareRobots
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.policies.trainable import autocast_dtype, build_loss
from vla_finetuning.policies.value import ValueLoss
from vla_finetuning.training.stream import Columns, WithAdvantage, WithPosition

logger = logging.getLogger(__name__)


def build_model(spec: PolicySpec, device: torch.device) -> tuple[PolicyLoss, torch.dtype | None]:
    """Return the policy's loss on `device`, trainable parameters chosen, and the autocast dtype (None for float32).

    Modules that training never uses are removed: `export` reads them from the base again.
    """
    policy, train = spec.start(), spec.train
    autocast = autocast_dtype(train.precision, device)
    preprocessor, _ = spec.processors()
    cameras = list(spec.config.image_features)
    augmentation = make_augmentation(train.augmentation, spec.image_transforms, spec.seed, cameras)
    images = DeviceHalf(preprocessor, spec.config, augmentation)
    compiler = None
    if train.compile:
        if reason := why_not(device):
            logger.warning("--train.compile does nothing: %s", reason)
        else:
            compiler = Compiler()
    backbone = spec.value is not None and spec.value.backbone_lr is not None
    loss: PolicyLoss = build_loss(
        policy,
        "full" if backbone else train.mode,
        adapters=spec.adapters,
        seed=spec.seed,
        autocast=autocast,
        images=images,
        mask_padding=train.mask_padding,
        attention=train.attention,
        checkpointing=train.activation_checkpointing,
        compile=compiler,
    )
    if spec.value is not None:
        assert isinstance(loss, FlowLoss)  # the plan refuses others
        loss = ValueLoss(loss, spec.value.bins, spec.seed, backbone)
    loss = loss.to(device)
    loss.train()
    return loss, autocast


def check_attention(spec: PolicySpec, loss: PolicyLoss, device: torch.device, autocast: torch.dtype | None) -> None:
    """Choose an attention kernel that is correct on this device for the run's shapes."""
    cameras = [keys for robot in spec.robots for keys in (robot.cameras, *(text.cameras for text in robot.texts))]
    counts = range(min(map(len, cameras)), spec.cameras + 1)
    shapes = [shape for cameras in counts for shape in loss.attentions(cameras, spec.prompts)]
    if shapes:
        loss.attention = choose_kernel(loss.attention, shapes, device, autocast or torch.float32).kernel


def build_optimizer(spec: PolicySpec, loss: PolicyLoss, steps: int) -> TrainableOptimizer:
    """Return the policy's optimizer and learning rate schedule: LeRobot's preset with the run's options."""
    recipe, policy = spec.recipe, loss.policy
    if isinstance(loss, ValueLoss):
        assert spec.value is not None
        built: Any = recipe.optimizer
        constants = {"lr": recipe.peak, "betas": built.betas, "eps": built.eps, "weight_decay": built.weight_decay}
        groups: list[dict[str, Any]] = [{"params": list(loss.critic.parameters())}]
        if spec.value.backbone_lr is not None:
            parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
            groups.append({"params": parameters, "lr_scale": spec.value.backbone_lr / recipe.peak})
        optimizer = torch.optim.AdamW(groups, **constants, fused=True)
        return take_optimizer(loss, optimizer, schedule=recipe.schedule(steps), clip_norm=recipe.clip_norm)
    return take_optimizer(
        policy,
        recipe.build(policy),
        schedule=recipe.schedule(steps),
        clip_norm=recipe.clip_norm,
        decay=spec.ema.decay if spec.ema.enable else None,
    )


def make_prepare(spec: PolicySpec, rows: Rows) -> Callable[[Columns], Columns]:
    """Return the CPU half of the policy's preprocessor, or of each robot's, for read tasks."""
    family, layouts = family_of(spec.config), list[PreparedRobot]()
    for number, robot in enumerate(spec.robots):
        preprocessor, _ = spec.select_robot(robot).processors()
        cameras = robot.cameras if spec.mixes_robots else rows.camera_keys
        make = partial(Prepare, config=robot.config, trusted=spec.trusted, texts=family.reads_texts)
        pipeline = make(preprocessor, camera_keys=cameras)
        layouts.append(PreparedRobot(pipeline, frozenset(cameras), robot.widths, robot.opening, robot.datasets, number))
        for text in robot.texts:
            prepare = pipeline if text.state else make(without_state(preprocessor), camera_keys=cameras)
            layouts.append(PreparedRobot(prepare, text.cameras, robot.widths, text.opening, (text.number,), number))
    per_robot_dims = spec.mixes_robots and spec.train.pad_loss == "own"
    prepare_rows: Callable[[Columns], Columns] = PrepareRobots(layouts, rows.camera_keys, per_robot_dims)
    if rows.positive is not None:
        prepare_rows = WithAdvantage(prepare_rows, rows.positive, ADVANTAGE, LABEL_DROPOUT, spec.seed)
    without_actions = [text.number for robot in spec.robots for text in robot.texts]
    prepare_rows = family.prepared(prepare_rows, spec.config, tokenizer_step(preprocessor), without_actions)
    return WithPosition(prepare_rows) if spec.augments else prepare_rows
