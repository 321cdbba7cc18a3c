"""Families of policies whose loss is LeRobot's own forward, with their differences from the plain `Family`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.policies.utils import populate_queues
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE
from torch import Tensor
from transformers import CLIPVisionConfig

from vla_finetuning.policies.family import MEAN_COUNT, Family, PolicyLoss


class ACTLoss(PolicyLoss):
    """LeRobot's loss: the mean L1 error over valid action steps plus the mean KL divergence of the latent over rows.

    With MEAN_COUNT in the batch, the L1 error is a mean over the valid action steps of the whole optimizer step.
    """

    def forward(self, batch: Mapping[str, Tensor], noise: Tensor | None = None, time: Tensor | None = None) -> Tensor:
        if MEAN_COUNT not in batch:
            return super().forward(batch)
        config, inputs = self.policy.config, self.images(batch)
        if config.image_features:
            inputs |= {OBS_IMAGES: [inputs[key] for key in config.image_features]}
        actions, (mean, log_variance) = self.policy.model(inputs)
        errors = F.l1_loss(inputs[ACTION], actions, reduction="none") * ~inputs["action_is_pad"].unsqueeze(-1)
        loss = errors.sum() / (batch[MEAN_COUNT] * errors.shape[-1])
        self.add_metrics({"l1_loss": loss})
        if config.use_vae and log_variance is not None:
            divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(-1)
            self.add_metrics({"kld_loss": divergence.mean()})
            loss = loss + divergence.mean() * config.kl_weight
        return loss

    def count(self, batch: Mapping[str, Tensor]) -> Tensor:
        return (~batch["action_is_pad"]).sum()


class ACT(Family):
    loss_class = ACTLoss
    train_options = frozenset({"exact_mean"})

    def remembers(self, config: Any) -> str:
        if config.temporal_ensemble_coeff is None:
            return super().remembers(config)
        return (
            f"with temporal_ensemble_coeff={config.temporal_ensemble_coeff:g} averages the chunks of past steps "
            "(--policy.temporal_ensemble_coeff=null: without)"
        )


# ---- policies that remember past steps ------------------------------------------------------------------------------


class Queued(Family):
    """Policies whose `predict_action_chunk` reads queues of the last `n_obs_steps` states and images."""

    def keeps_size(self, config: Any) -> bool:
        return getattr(config, "resize_shape", None) is None and getattr(config, "image_resize_shape", None) is None

    def remembers(self, config: Any) -> str:
        """Return the reason, also for one step: `predict_chunk` fills the queues from windows only."""
        return super().remembers(config) or f"with n_obs_steps={config.n_obs_steps} predicts from a queue of past steps"

    def predict_chunk(self, policy: PreTrainedPolicy, observation: dict[str, Any], **conditions: Any) -> Tensor:
        """Push the steps of the window into the policy's queues one by one, then predict."""
        owner: Any = policy
        owner.reset()
        # LeRobot's pipelines leave an action of None, which the policy would look up in its empty queue.
        observation = {key: value for key, value in observation.items() if key != ACTION}
        windows = {key: observation[key] for key in owner._queues if key in observation}
        if cameras := list(policy.config.image_features):
            windows[OBS_IMAGES] = torch.stack([observation[key] for key in cameras], dim=-4)
        for step in range(observation[OBS_STATE].shape[1]):
            owner._queues = populate_queues(owner._queues, {key: window[:, step] for key, window in windows.items()})
        return owner.predict_action_chunk({**observation, **windows})


# Attribute with the number of forwards that have trained the codebook.
MODULE, COUNT = "vqbet.action_head.vqvae_model", "optimized_steps"


class VQBeTLoss(PolicyLoss):
    """LeRobot's loss with its counter of forwards as a buffer, which only training forwards increment.

    The first `n_vqvae_training_steps` forwards train a codebook of action chunks, which is frozen afterwards; the
    held-out loss is NaN until then. LeRobot 0.6.1 counts in an int that its resume resets to 0.
    """

    def __init__(self, policy: PreTrainedPolicy, **options: Any):
        super().__init__(policy, **options)
        vqvae = policy.get_submodule(MODULE)
        if COUNT not in dict(vqvae.named_buffers()):
            count: Any = vqvae.__dict__.pop(COUNT)
            vqvae.register_buffer(COUNT, torch.tensor(count))

    def forward(self, batch: Mapping[str, Tensor], noise: Tensor | None = None, time: Tensor | None = None) -> Tensor:
        discretized = self.policy.get_buffer(f"{MODULE}.discretized")
        if self.training:
            self.policy.train()  # as `lerobot-train` does every step: eval mode freezes the codebook
        elif not discretized:  # LeRobot's loss is the codebook's, far below the policy's later loss
            return torch.full_like(discretized, torch.nan, dtype=torch.float32)
        return super().forward(batch)


class VQBeT(Queued):
    loss_class = VQBeTLoss

    def check_run(self, options: Any) -> None:
        first = "its first steps (n_vqvae_training_steps) train a codebook and nothing else"
        by_training_loss = options.best_kept and options.keep_best_by == "loss" and not options.eval_steps
        for is_given, flag, why in (
            (options.peft.enabled, "--peft.method_type", f"has no adapters: {first}, and adapters leave that frozen"),
            (by_training_loss, "--keep_best", f"needs --eval_steps: {first}, at a lower loss than all later steps"),
            # The codebook exchanges sums among the workers in every forward.
            (options.scaling.min_workers, "--scaling.num_workers", "needs a fixed number of workers: give one number"),
        ):
            if is_given:
                raise ValueError(f"{flag}: a '{self.type}' {why}")

    def check_plan(self, config: Any, columns: Collection[str], folder: Path | None, forwards: int) -> list[str]:
        count = config.n_vqvae_training_steps
        if forwards < count and folder is None:
            raise ValueError(
                f"--policy.n_vqvae_training_steps={count}: so many micro-batches of a worker train VQ-BeT's codebook "
                f"alone, and the run has {forwards}; give more --steps, or a smaller number"
            )
        text = f"the first {min(count, forwards)} of {forwards} micro-batches of a worker train VQ-BeT's codebook alone"
        return [text + (", unless the policy has a trained one" if folder is not None else "")]

    def training_state(self) -> dict[str, Tensor]:
        return {f"{MODULE}.{COUNT}": torch.tensor(0)}


class MultiTaskDiT(Queued):
    def check_plan(self, config: Any, columns: Collection[str], folder: Path | None, forwards: int) -> list[str]:
        size = CLIPVisionConfig.from_pretrained(config.vision_encoder_name).image_size
        for key, feature in config.image_features.items():
            encoded = tuple(config.image_crop_shape or config.image_resize_shape or feature.shape[1:])
            if encoded != (size, size):
                raise ValueError(
                    f"{key} is encoded as {encoded[0]}x{encoded[1]} pixels, and {config.vision_encoder_name} takes "
                    f"{size}x{size}: give --policy.image_crop_shape [{size},{size}], of images of at least that size, "
                    f"or --policy.image_resize_shape [{size},{size}]"
                )
        return []


class Evo1(Family):
    pads_statistics = True
    ignored_options = {
        "task_field": "--rename_map to call the text column `task`",
        "embodiment_id_field": "--policy.default_embodiment_id",
    }

    def check_plan(self, config: Any, columns: Collection[str], folder: Path | None, forwards: int) -> list[str]:
        """Refuse columns that LeRobot's forward takes from the dataset, and that rows do not have here."""
        if read := sorted({"embodiment_id", "state_mask", "action_mask"}.intersection(columns)):
            raise ValueError(
                f"an '{self.type}' learns from the dataset's {' and '.join(read)} with lerobot-train, and not here: "
                "train with it, or leave that out by another name (--rename_map), with one embodiment for all rows "
                "(--policy.default_embodiment_id)"
            )
        return []

    def make_loss(self, policy: PreTrainedPolicy, **options: Any) -> PolicyLoss:
        loss = super().make_loss(policy, **options)
        # LeRobot casts pixels to the dtype of the option vlm_dtype, which the weights may no longer have.
        policy.model.embedder.model_dtype = next(policy.model.embedder.model.parameters()).dtype
        return loss


class FastWAMLoss(PolicyLoss):
    """LeRobot's loss, computed on the device and in the dtype of the weights.

    LeRobot 0.6.1 stores device and dtype at construction and always moves inputs there.
    """

    def forward(self, batch: Mapping[str, Tensor], noise: Tensor | None = None, time: Tensor | None = None) -> Tensor:
        core: Any = self.policy.model
        trains = next(parameter for parameter in core.parameters() if parameter.requires_grad)
        core.device, core.torch_dtype = trains.device, trains.dtype
        return super().forward(batch)


class FastWAM(Family):
    loss_class = FastWAMLoss
    sorts_cameras = True


class MolmoAct2(Family):
    # LeRobot 0.6.1 registers its normalisation steps under names that its overrides of statistics do not match.
    rebuilds_processors = True

    def cannot_predict(self, config: Any) -> str:
        if config.inference_action_mode is not None:
            return ""
        return "it has two ways to predict, give one: --policy.inference_action_mode continuous, or discrete"


# Action widths of one arm and of two: position (3), rotation (6), gripper (1).
ROTATED = (10, 20)


class XVLA(Family):
    any_inputs = True
    ignored_options = {"domain_feature_key": "the domain_id of the step xvla_add_domain_id in its preprocessor"}

    def env_processors(self, config: PreTrainedConfig, env: Any, later_steps: Collection[str] = ()) -> tuple[Any, Any]:
        """Return for LIBERO LeRobot's processors of end-effector actions with 6D rotations.

        LeRobot 0.6.1 uses them for every environment and every action. It also normalises images twice if the policy's
        preprocessor normalises them, which then raises.
        """
        if not self._rotates(config, env):
            return super().env_processors(config, env, later_steps)
        # Imported lazily: most runs use no environment.
        from lerobot.envs import make_env_pre_post_processors

        before, after = make_env_pre_post_processors(env, config)
        before.steps = [step for step in before.steps if getattr(step, "_registry_name", None) not in later_steps]
        return before, after

    def env_features(
        self, config: PreTrainedConfig, env: Any, features: dict[str, PolicyFeature]
    ) -> dict[str, PolicyFeature]:
        if not self._rotates(config, env):
            return features
        return {**features, OBS_STATE: PolicyFeature(FeatureType.STATE, (ROTATED[-1],)), **config.output_features}

    def _rotates(self, config: PreTrainedConfig, env: Any) -> bool:
        """Return whether LeRobot's processors can convert the actions for the environment."""
        from lerobot.envs.configs import LiberoEnv

        return isinstance(env, LiberoEnv) and config.output_features[ACTION].shape[0] in ROTATED

    def own_keys(self, policy: PreTrainedPolicy, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename keys as LeRobot's `XVLAPolicy.from_pretrained` does."""
        # Imported lazily: Florence-2 takes a second to import.
        from lerobot.policies.xvla import modeling_xvla

        if not modeling_xvla._is_vendored_florence_state_dict(weights):
            return weights
        return modeling_xvla._remap_vendored_florence_state_dict(weights)


class VLAJEPA(Family):
    ignored_options = {"reinit_modules": "weights that all fit the configuration: here none may be left out"}


FAMILIES = (
    ACT("act", as_lerobot=True, offline=True, chunk_draws="nothing", in_float32=True),
    Queued("diffusion", as_lerobot=True, offline=True, in_float32=True, sized_by_images=True),
    XVLA("xvla", as_lerobot=True, tokenizer_option="tokenizer_name"),
    VQBeT("vqbet", as_lerobot=True, offline=True, in_float32=True, sized_by_images=True),
    MultiTaskDiT(
        "multi_task_dit", as_lerobot=True, tokenizer_option="text_encoder_name", in_float32=True, sized_by_images=True
    ),
    Evo1("evo1", as_lerobot=True, tokenizer_option="vlm_model_name", reads_texts=True),
    VLAJEPA("vla_jepa", as_lerobot=True, tokenizer_option="qwen_model_name", reads_texts=True, sized_by_images=True),
    FastWAM("fastwam", as_lerobot=True, tokenizer_option="tokenizer_model_id", reads_texts=True, sized_by_images=True),
    Family("eo1", as_lerobot=True, tokenizer_option="vlm_base", reads_texts=True),
    MolmoAct2("molmoact2", as_lerobot=True, tokenizer_option="checkpoint_path", reads_texts=True),
    Family("tdmpc", refused="its target network follows the others after every step, without a gradient"),
    Family("gaussian_actor", refused="it is an actor of online reinforcement learning, and its forward is no loss"),
    Family("groot", refused="its forward needs the package dm-tree, which is not in requirements.lock"),
    Family("wall_x", refused="it needs the packages torchdiffeq and qwen-vl-utils, which are not in requirements.lock"),
    Family(
        "lingbot_va",
        refused="LeRobot computes its training attention in half precision, by kernels that have no gradient on a "
        "CPU, so that no test can show it",
    ),
)
