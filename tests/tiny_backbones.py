"""LeRobot's policies at sizes that train in a second: ordinary options, and local folders in place of the Hub's.

What LeRobot 0.6.1 takes from no option and no folder is patched, for as long as a `Kind`'s `here` lasts.
"""

import contextlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import AutoencoderKLWan
from lerobot.policies.fastwam.configuration_fastwam import default_action_dit_config, default_video_dit_config
from lerobot.policies.fastwam.wan import components
from lerobot.policies.molmoact2.molmoact2_hf_model.configuration_molmoact2 import MolmoAct2Config as HFMolmoAct2Config
from lerobot.policies.molmoact2.molmoact2_hf_model.modeling_molmoact2 import MolmoAct2ForConditionalGeneration
from lerobot.policies.pi0 import modeling_pi0
from lerobot.policies.pi0_fast import modeling_pi0_fast
from lerobot.policies.pi05 import modeling_pi05
from lerobot.policies.vla_jepa import modeling_vla_jepa
from lerobot.processor import tokenizer_processor
from transformers import (  # type: ignore[attr-defined]  # some are in modules that it loads when they are asked for
    CLIPConfig,
    CLIPModel,
    InternVLConfig,
    InternVLModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    SmolVLMConfig,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
    UMT5Config,
    UMT5EncoderModel,
    VJEPA2Config,
    VJEPA2Model,
    VJEPA2VideoProcessor,
)

from vla_finetuning.policies import pipelines
from vla_finetuning.policies.families import pi0
from vla_finetuning.policies.tiny_pi05 import PAD_TOKEN, UNKNOWN_TOKEN, make_tokenizer

WORDS = ["go", "to", "the", "red", "blue", "bin"]
VOCABULARY = 512


@dataclass(frozen=True)
class Kind:
    """A policy type to be tried.

    Attributes:
        options: of the policy, `--policy.*`.
        folders: writes what the options name into a folder, and returns those options.
        here: what has to be patched to build it.
        run: options of the run.
        type: of the policy, where it is not the name in KINDS.
        lora: names of layers for adapters, as a regular expression; "own": LeRobot's choice; None: they are refused.
    """

    options: dict[str, str | float | int]
    folders: Callable[[Path], dict[str, str]] = lambda folder: {}
    here: Callable[[], AbstractContextManager] = contextlib.nullcontext
    run: dict[str, str] = field(default_factory=dict)
    type: str | None = None
    lora: str | None = r".*(q_proj|v_proj|qkv|adaLN_modulation.1)"


def make_small_tokenizer(**tokens):
    """A tokenizer of a few words, with special tokens."""
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": PAD_TOKEN, "unk_token": UNKNOWN_TOKEN}
    backend = make_tokenizer(WORDS).backend_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=tokens, **special)


class ActionTokenizer:
    """In place of FAST, which is code on the Hub: as many tokens as the actions' first and second sums say."""

    def __call__(self, actions):
        return [(chunk.abs().sum(-1) * 10 % 64).to(torch.int64).tolist() for chunk in actions]


@contextlib.contextmanager
def tiny_paligemma(modeling, *, width=32, depth=2, mlp_dim=32, head_dim=8, vision_depth=1, image_size=28):
    """LeRobot's PI0, PI0.5 or PI0-FAST, by its module, with a small vision tower and vocabulary, and a tokenizer."""
    sizes = SimpleNamespace(width=width, depth=depth, mlp_dim=mlp_dim, num_heads=8, num_kv_heads=1, head_dim=head_dim)
    names = ("PaliGemmaForConditionalGenerationWithPiGemma", "PiGemmaForCausalLM")
    paligemma, expert = (getattr(modeling, name, None) for name in names)

    def small(config):
        vision = {"hidden_size": width, "intermediate_size": mlp_dim, "num_hidden_layers": vision_depth}
        vision |= {"num_attention_heads": 4, "image_size": image_size, "patch_size": 14, "projection_dim": width}
        for name, value in vision.items():
            setattr(config.vision_config, name, value)
        config.text_config.vocab_size = config._vocab_size = config.image_token_index = VOCABULARY
        return paligemma(config)

    def small_expert(config):
        config.vocab_size = VOCABULARY
        return expert(config)

    tokenizers = SimpleNamespace(from_pretrained=lambda *_, **__: make_small_tokenizer())
    action_tokenizers = SimpleNamespace(from_pretrained=lambda *_, **__: ActionTokenizer())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling, "get_gemma_config", lambda variant: sizes)
        patch.setattr(modeling, names[0], small)
        if expert is not None:
            patch.setattr(modeling, names[1], small_expert)
        for module in (tokenizer_processor, modeling):
            patch.setattr(module, "AutoTokenizer", tokenizers, raising=False)
            patch.setattr(module, "AutoProcessor", action_tokenizers, raising=False)
        patch.setattr(pi0, "IMAGE_SIZE", (image_size, image_size))
        patch.setattr(pipelines, "require_model", lambda *_: None)
        yield


@contextlib.contextmanager
def benchmarked(kind, folder):
    """A policy type for `benchmarks.step`, near the sizes of the tiny PI0.5. Yields its options."""
    common = {"tokenizer_max_length": 64, "chunk_size": 10, "n_action_steps": 10}
    if kind == "smolvla":
        # As in the real one the vision tower takes four fifths of a step, and 16 patches become a token.
        tower = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4}
        text = {**tower, "num_key_value_heads": 2, "head_dim": 16}
        vision = {**tower, "num_hidden_layers": 3, "image_size": 128, "patch_size": 8}
        backbone = smolvlm(folder, layers=4, text=text, vision=vision, scale_factor=4)
        yield {**common, **backbone, "num_vlm_layers": 4, "resize_imgs_with_padding": (128, 128)}
        return
    sizes = {"width": 64, "depth": 3, "mlp_dim": 128, "head_dim": 16, "vision_depth": 2, "image_size": 56}
    with tiny_paligemma({"pi0": modeling_pi0}[kind], **sizes):
        yield {**common, "image_resolution": (56, 56)}


# Small, and with schedules of which ten steps see every part.
ACT = Kind(
    {
        **{"chunk_size": 4, "n_action_steps": 4, "dim_model": 16, "n_heads": 2, "dim_feedforward": 16},
        **{"n_encoder_layers": 1, "n_vae_encoder_layers": 1, "latent_dim": 4, "pretrained_backbone_weights": "null"},
        # Two rates.
        **{"optimizer_lr": 1e-4, "optimizer_lr_backbone": 1e-5, "optimizer_weight_decay": 0.1},
    },
    lora=r".*encoder.*\.linear[12]",
)
DIFFUSION = Kind(
    {
        **{"horizon": 8, "n_action_steps": 4, "down_dims": "[8, 16]", "diffusion_step_embed_dim": 8, "n_groups": 4},
        **{"crop_shape": "[40, 40]", "spatial_softmax_num_keypoints": 4, "num_train_timesteps": 10},
        **{"scheduler_warmup_steps": 3, "optimizer_weight_decay": 0.01, "pretrained_backbone_weights": "null"},
    },
    lora=r".*cond_encoder\.1",
)
PALIGEMMA: dict[str, str | float | int] = {
    **{"chunk_size": 4, "n_action_steps": 4, "max_state_dim": 8, "max_action_dim": 8, "tokenizer_max_length": 12},
    **{"image_resolution": "[28, 28]", "scheduler_warmup_steps": 3, "scheduler_decay_steps": 7, "optimizer_lr": 1e-4},
}
PI0 = Kind(PALIGEMMA, here=lambda: tiny_paligemma(modeling_pi0), lora="own")
PI05 = Kind(
    {**PALIGEMMA, "tokenizer_max_length": 32},
    here=lambda: tiny_paligemma(modeling_pi05),
    run={"dataset.statistics": "lerobot"},  # of quantiles, the averages over episodes that LeRobot stores
    lora="own",
)

PI0_FAST = Kind(
    {
        **{key: value for key, value in PALIGEMMA.items() if key not in ("tokenizer_max_length",)},
        **{"tokenizer_max_length": 24, "max_action_tokens": 12},
    },
    here=lambda: tiny_paligemma(modeling_pi0_fast),
    run={"policy.trust_remote_code": "true"},
)
VQBET = Kind(
    {
        **{"n_obs_steps": 2, "n_action_pred_token": 2, "action_chunk_size": 3, "crop_shape": "[40, 40]"},
        **{"vqvae_n_embed": 4, "vqvae_embedding_dim": 8, "vqvae_enc_hidden_dim": 8, "n_vqvae_training_steps": 2},
        **{"gpt_block_size": 32, "gpt_input_dim": 16, "gpt_output_dim": 16, "gpt_n_layer": 1, "gpt_n_head": 2},
        **{"gpt_hidden_dim": 16, "spatial_softmax_num_keypoints": 4, "pretrained_backbone_weights": "null"},
        **{"scheduler_warmup_steps": 3, "offset_loss_weight": 10, "optimizer_vqvae_lr": 1e-3},
    },
    lora=None,
)
VQBET_GROUP_NORM = replace(VQBET, options={**VQBET.options, "use_group_norm": "true"}, type="vqbet")


def clip(folder):
    """A CLIP of two small towers, and its tokenizer."""
    folder /= "clip"
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**tower, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vision = {**tower, "image_size": 32, "patch_size": 16}
        CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(folder)
    make_small_tokenizer().save_pretrained(folder)
    return {"vision_encoder_name": str(folder), "text_encoder_name": str(folder)}


MULTI_TASK_DIT = Kind(
    {
        **{"horizon": 8, "n_action_steps": 4, "num_train_timesteps": 10, "hidden_dim": 16, "num_layers": 1},
        **{"num_heads": 2, "timestep_embed_dim": 8, "tokenizer_max_length": 12, "image_crop_shape": "[32, 32]"},
        **{"scheduler_warmup_steps": 3, "optimizer_lr": 1e-4, "optimizer_weight_decay": 0.01},
    },
    folders=clip,
)


def smolvlm(folder, dtype="float32", *, layers=2, text=None, vision=None, scale_factor=2):
    """A SmolVLM of two small towers, its tokenizer and processors; `dtype` is what its text model says of itself."""
    folder /= "smolvlm"
    image_tokens = {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"}
    tokens = {**image_tokens, "global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>"}
    tokenizer = make_small_tokenizer(**tokens)
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = {**tower, "model_type": "llama", "num_hidden_layers": layers, "num_key_value_heads": 1, "head_dim": 8}
    SmolVLMConfig(
        vision_config={**tower, "image_size": 32, "patch_size": 8, **(vision or {})},
        text_config={**llama, "vocab_size": VOCABULARY, "pad_token_id": 0, "dtype": dtype, **(text or {})},
        scale_factor=scale_factor,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
    ).save_pretrained(folder)
    SmolVLMProcessor(SmolVLMImageProcessor(), tokenizer, SmolVLMVideoProcessor()).save_pretrained(folder)
    return {"vlm_model_name": str(folder)}


SMOLVLA = Kind(
    {
        **{"chunk_size": 4, "n_action_steps": 4, "max_state_dim": 8, "max_action_dim": 8, "tokenizer_max_length": 12},
        **{"resize_imgs_with_padding": "[32, 32]", "num_vlm_layers": 2, "expert_width_multiplier": 1.0},
        **{"optimizer_lr": 1e-4, "scheduler_warmup_steps": 3, "scheduler_decay_steps": 7},
    },
    folders=smolvlm,
    run={"train.mode": "expert"},
    lora="own",
)


def bart_tokenizer(folder):
    make_small_tokenizer().save_pretrained(folder / "tokenizer")
    return {"tokenizer_name": str(folder / "tokenizer")}


FLORENCE = {
    "vision_config": {
        **{"depths": [1, 1], "embed_dim": [8, 16], "num_heads": [1, 2], "num_groups": [1, 2], "window_size": 4},
        **{"patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1], "patch_prenorm": [False, True]},
        **{"projection_dim": 16, "max_position_embeddings": 16, "max_temporal_embeddings": 4, "drop_path_rate": 0.1},
    },
    "text_config": {
        **{"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16},
        **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": VOCABULARY},
        **{"max_position_embeddings": 64, "dropout": 0.1},
    },
}
XVLA = Kind(
    {
        **{"chunk_size": 4, "n_action_steps": 4, "max_state_dim": 8, "max_action_dim": 8, "tokenizer_max_length": 12},
        **{"florence_config": json.dumps(FLORENCE), "hidden_size": 16, "depth": 1, "num_heads": 2, "num_domains": 2},
        **{"len_soft_prompts": 2, "dim_time": 8, "max_len_seq": 64, "action_mode": "auto"},
        **{"resize_imgs_with_padding": "[32, 32]", "optimizer_lr": 1e-4, "optimizer_weight_decay": 0.01},
        **{"scheduler_warmup_steps": 3, "scheduler_decay_steps": 7},
    },
    folders=bart_tokenizer,
)


def internvl(folder):
    """An InternVL of two small towers, and its tokenizer."""
    folder /= "internvl"
    tokens = {"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>"}
    tokenizer = make_small_tokenizer(**tokens)
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    qwen = {"model_type": "qwen2", **tower, "num_hidden_layers": 2, "num_key_value_heads": 1}
    config = InternVLConfig(
        vision_config={**tower, "image_size": [32, 32], "patch_size": [8, 8]},
        text_config={**qwen, "vocab_size": VOCABULARY, "max_position_embeddings": 128},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        InternVLModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"vlm_model_name": str(folder)}


EVO1 = Kind(
    {
        **{"chunk_size": 4, "n_action_steps": 4, "max_state_dim": 8, "max_action_dim": 8, "max_views": 2},
        **{"training_stage": "stage2", "vlm_num_layers": 1, "vlm_dtype": "float32", "image_resolution": "[32, 32]"},
        **{"embed_dim": 16, "hidden_dim": 16, "state_hidden_dim": 16, "num_heads": 2, "num_layers": 1},
        **{"optimizer_lr": 1e-4, "optimizer_weight_decay": 0.01, "scheduler_warmup_steps": 3},
    },
    folders=internvl,
    lora=r".*(ff\.[02]|[qv]_proj)",
)

# A chat template that says what everybody says, one after the other, pictures in their place.
CHAT = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


def qwen_tokenizer():
    """A small tokenizer with a Qwen-VL's tokens of pictures, and their numbers as its configuration names them."""
    names = ("image", "video", "vision_start", "vision_end")
    tokens = dict(
        zip((f"{name}_token" for name in names), ("<|image_pad|>", "<|video_pad|>", *QWEN_VISION), strict=True)
    )
    tokenizer = make_small_tokenizer(**tokens)
    return tokenizer, {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}


QWEN_VISION = ("<|vision_start|>", "<|vision_end|>")
QWEN_TEXT = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "vocab_size": VOCABULARY},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
}
QWEN_TOWER = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 16}


def qwen3_and_vjepa(folder):
    """A Qwen3-VL of two small towers with its processors, and an encoder of videos with its own."""
    tokenizer, numbers = qwen_tokenizer()
    qwen = Qwen3VLConfig(
        text_config={**QWEN_TEXT, "head_dim": 8, "tie_word_embeddings": True, "initializer_range": 0.3},
        vision_config={**QWEN_TOWER, "patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        tie_word_embeddings=True,
        **numbers,
    )
    # An attention head's dimensions are three for time, height and width, each of them at least four (LeRobot 0.6.1).
    tower = {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1, "mlp_ratio": 1.0}
    vjepa = VJEPA2Config(
        **{**tower, **{f"pred_{name}": value for name, value in tower.items()}, "pred_num_mask_tokens": 1},
        **{"patch_size": 16, "crop_size": 32, "image_size": 32, "frames_per_clip": 4, "tubelet_size": 2},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3VLForConditionalGeneration(qwen).save_pretrained(folder / "qwen3_vl")
        VJEPA2Model(vjepa).save_pretrained(folder / "vjepa2")
    images = Qwen2VLImageProcessor(patch_size=16, size={"shortest_edge": 1024, "longest_edge": 4096})
    processor = Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(), chat_template=CHAT)
    processor.save_pretrained(folder / "qwen3_vl")
    VJEPA2VideoProcessor(crop_size={"height": 32, "width": 32}, size={"shortest_edge": 36}).save_pretrained(
        folder / "vjepa2"
    )
    return {"qwen_model_name": str(folder / "qwen3_vl"), "jepa_encoder_name": str(folder / "vjepa2")}


@contextlib.contextmanager
def without_amp():
    """VLA-JEPA computes its language model in bfloat16, on a CPU too, and has no option that says otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_vla_jepa, "is_amp_available", lambda device: False)
        yield


VLA_JEPA = Kind(
    {
        **{"chunk_size": 4, "n_action_steps": 4, "num_video_frames": 4, "torch_dtype": "float32"},
        **{"action_model_type": "DiT-test", "action_hidden_size": 16, "action_num_layers": 2},
        **{"num_action_tokens_per_timestep": 2, "num_embodied_action_tokens_per_instruction": 3},
        **{"predictor_depth": 1, "predictor_num_heads": 2, "repeated_diffusion_steps": 2},
        **{"optimizer_weight_decay": 0.01, "scheduler_warmup_steps": 3, "scheduler_decay_steps": 7},
    },
    folders=qwen3_and_vjepa,
    here=without_amp,
    lora=r".*(to_q|to_v|[qv]_proj)",
)


def qwen2_5(folder):
    """A Qwen2.5-VL of two small towers with its processors."""
    folder /= "qwen2_5_vl"
    tokenizer, numbers = qwen_tokenizer()
    vision = {**QWEN_TOWER, "patch_size": 14, "fullatt_block_indexes": [0], "window_size": 56}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Qwen2_5_VLConfig(text_config={**QWEN_TEXT, "initializer_range": 0.3}, vision_config=vision, **numbers)
        Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    processor = Qwen2_5_VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(), chat_template=CHAT)
    processor.save_pretrained(folder)
    return {"vlm_base": str(folder)}


EO1 = Kind(
    {
        **{"chunk_size": 4, "n_action_steps": 4, "max_state_dim": 8, "max_action_dim": 8, "dtype": "float32"},
        **{"image_min_pixels": 28 * 28, "image_max_pixels": 4 * 28 * 28, "optimizer_weight_decay": 0.01},
        **{"scheduler_warmup_steps": 3, "scheduler_decay_steps": 7},
    },
    folders=qwen2_5,
    lora=r".*[qv]_proj",
)


def umt5(folder):
    """The text encoder of a Wan, and its tokenizer."""
    config = UMT5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        UMT5EncoderModel(config).save_pretrained(folder / "wan" / "text_encoder")
    make_small_tokenizer().save_pretrained(folder / "wan" / "tokenizer")
    return {"text_encoder_model_id": str(folder / "wan"), "tokenizer_model_id": str(folder / "wan" / "tokenizer")}


@contextlib.contextmanager
def tiny_wan_vae():
    """FastWAM's encoder of videos is named by a constant; its latents have 48 channels."""
    sizes = {"base_dim": 4, "decoder_base_dim": 4, "z_dim": 48, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    wan = {"temperal_downsample": [False, True, True], "is_residual": True, "patch_size": 2, "scale_factor_spatial": 16}
    latents = {"latents_mean": [0.0] * 48, "latents_std": [1.0] * 48}

    def make(*_, torch_dtype, **__):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return AutoencoderKLWan(**sizes, **wan, **latents, in_channels=12, out_channels=12).to(torch_dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(components, "AutoencoderKLWan", SimpleNamespace(from_pretrained=make))
        yield


WAN = {"hidden_dim": 16, "ffn_dim": 16, "freq_dim": 16, "text_dim": 16, "num_heads": 2, "attn_head_dim": 8}
FASTWAM = Kind(
    {
        **{"action_dim": 3, "proprio_dim": 4, "action_horizon": 4, "n_action_steps": 4, "num_video_frames": 5},
        **{"action_video_freq_ratio": 1, "image_size": "[32, 32]", "context_len": 24, "tokenizer_max_len": 24},
        "video_dit_config": json.dumps({**default_video_dit_config(3), **WAN, "num_layers": 1}),
        "action_dit_config": json.dumps({**default_action_dit_config(3), **WAN, "num_layers": 1}),
        "torch_dtype": "float32",
    },
    folders=umt5,
    here=tiny_wan_vae,
    lora=r".*ffn.[02]",
)


def molmo(folder):
    """A MolmoAct2 of small towers, with its tokenizer of single characters, and one of actions."""
    folder /= "molmoact2"
    of_image = ("im_start", "low_res_im_start", "im_end", "im_low", "im_patch", "im_col", "frame_start", "frame_end")
    spans = [f"{name}_{end}" for name in ("action", "state", "setup", "control") for end in ("start", "end")]
    counted = [f"{name}_{number}" for name, count in (("state", 256), ("action", 64)) for number in range(count)]
    tokens = [f"<{name}>" for name in (*of_image, *spans, "action_output", *counted)]
    characters = {chr(code): number for number, code in enumerate((*range(33, 127), ord("Ġ")))}
    tokenizer = Qwen2Tokenizer(
        characters, [], unk_token="!", bos_token=None, extra_special_tokens=[*tokens, "<|image|>", "<|video|>"]
    )
    numbers = {token[1:-1]: tokenizer.convert_tokens_to_ids(token) for token in tokens}
    layer = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    mlp, wide = {"intermediate_size": 16, "num_hidden_layers": 2}, {"initializer_range": 0.3}
    config = HFMolmoAct2Config(
        vit_config={**layer, **mlp, "image_default_input_size": (28, 28), "image_num_pos": 4},
        adapter_config={**layer, "vit_layers": (-1, -2), "intermediate_size": 16, "text_hidden_size": 16},
        text_config={**layer, **mlp, **wide, "vocab_size": 1024, "additional_vocab_size": 8},
        action_expert_config={
            **{"hidden_size": 16, "num_layers": 2, "num_heads": 2, "ffn_multiple_of": 8, "timestep_embed_dim": 8}
        },
        **dict(zip(MOLMO_TOKENS, (numbers[name] for name in of_image), strict=True)),
        **{f"{name}_token_id": numbers[name] for name in (*spans[:4], "action_output")},
        **{f"{name}_token_start_id": numbers[f"{name}_0"] for name in ("state", "action")},
        **{"num_state_tokens": 256, "num_action_tokens": 64, "max_action_horizon": 4},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        MolmoAct2ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    images = {"size": {"height": 28, "width": 28}, "crop_mode": "resize", "max_crops": 1}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": images}))
    make_small_tokenizer().save_pretrained(folder / "actions")
    return {"checkpoint_path": str(folder), "discrete_action_tokenizer": str(folder / "actions")}


MOLMO_TOKENS = (
    *("image_start_token_id", "low_res_image_start_token_id", "image_end_token_id", "image_low_res_id"),
    *("image_patch_id", "image_col_id", "frame_start_token_id", "frame_end_token_id"),
)
MOLMOACT2 = Kind(
    {
        **{"chunk_size": 4, "n_action_steps": 4, "model_dtype": "float32", "num_flow_timesteps": 2},
        "inference_action_mode": "continuous",
        **{"optimizer_weight_decay": 0.01, "scheduler_warmup_steps": 3, "scheduler_decay_steps": 7},
    },
    folders=molmo,
    lora=r".*att_proj",
)

KINDS = {
    **{"act": ACT, "diffusion": DIFFUSION, "pi0": PI0, "pi05": PI05, "pi0_fast": PI0_FAST, "smolvla": SMOLVLA},
    **{"vqbet": VQBET},
    **{"vqbet with GroupNorm": VQBET_GROUP_NORM, "multi_task_dit": MULTI_TASK_DIT, "xvla": XVLA},
    **{"evo1": EVO1, "vla_jepa": VLA_JEPA, "eo1": EO1, "fastwam": FASTWAM, "molmoact2": MOLMOACT2},
}
