"""Tiny random models of every type that the installed transformers knows: a rule that shrinks configs, and some overrides."""

import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers as library
from torch import Tensor, nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

library.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]

VOCABULARY, WIDTH, LAYERS, HEADS, POSITIONS, IMAGE, TOKENS = 128, 64, 3, 4, 128, 32, 12
MAPPINGS = {  # ours -> the library's
    "causal": "CAUSAL_LM",
    "masked": "MASKED_LM",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "speech": "SPEECH_SEQ_2_SEQ",
    "image": "IMAGE_CLASSIFICATION",
    "vision": "IMAGE",
}
MEL_BINS = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feat_in", "n_mels")
TOWERS = ("clip", "clip_vision_model", "siglip", "siglip2", "siglip2_vision_model", "metaclip_2")

# The first pattern that matches a field's whole name gives its size; None keeps the default, as do fields that match nothing.
SIZES: tuple[tuple[str, int | None], ...] = (
    (r"(task_)?type_vocab_size|n_langs|num_(dense|kv_shared|nextn_predict|adapter|mtp|conv|fov_head)_layers", None),
    (r"(.*_)?vocab_size(_per_layer_input|_base)?|encoder_hash_byte_group_vocab", VOCABULARY),
    (r"qk_rope_head_dim|rotary_dim", WIDTH // HEADS // 2),
    (r"(.*_)?head_dim|d_kv|dim_head|d_head|attention_head_size|kv_channels", WIDTH // HEADS),
    (r"(q|kv|o)_lora_rank|hc_lowrank|gated_norm_rank|laurel_rank|adapter_rank", WIDTH // 2),
    (r"(.*_)?num_(key_value|kv|key|value)_heads|kv_n_heads", HEADS // 2),
    (r"(.*_)?(num_|n_)?(attention_)?heads?", HEADS),
    (r"(.*_)?(ffn|intermediate|feed_forward|ffn_hidden)_(size|dim)(_mlp)?|d_ff|dff|dim_ff|n_inner|d_inner|mlp_dim", 2 * WIDTH),
    (r"(.*_)?(hidden|embedding|emb|embed)_(size|dim|dims)|hidden_size_(global|per_layer_input)|projection_dim", WIDTH),
    (r"d_model|n_embd|dim|dim_model_base|out_hidden_size|output_proj_dims", WIDTH),
    (r"(.*_)?(num_hidden|num|n|encoder|decoder|num_encoder|num_decoder)_layers?|num_blocks|depth", LAYERS),
    (r"(.*_)?(num|n)_(.*_)?experts|zero_expert_num", 4),
    (r"num_experts_per_tok|moe_top_?k|moe_k", 2),
    (r"n_group|topk_group|(n|num)_shared_experts", 1),
    (r"(.*_)?max_(.*_)?position(s|_embeddings)|n_positions|n_ctx|max_seq_len|context_length", POSITIONS),
    (r"image_size|crop_size|pretrain_image_size", IMAGE),
    (r"patch_size", 8),
    (r"sliding_window(_size)?|local_attention|attention_window_size|attention_chunk_size", 8),
)
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

PYRAMID = {"image_size": 64, "patch_size": 4, "hidden_sizes": [16, 32, 64, 64], "depths": [2, 2, 2, 2]}
SWIN = {"image_size": 64, "patch_size": 4, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OVERRIDES: dict[str, dict[str, Any]] = {  # where a default is None or belongs to other sizes
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"num_hidden_layers": LAYERS},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 4},
    "convnext": PYRAMID,
    "convnextv2": PYRAMID,
    "donut-swin": SWIN,
    "efficientnet": {"width_coefficient": 0.5, "depth_coefficient": 1.0, "hidden_dim": 640},
    "levit": {"image_size": 64, "patch_size": 16},
    "mobilevitv2": {"image_size": 128, "patch_size": 2},
    "swin": SWIN,
    "swin2sr": SWIN | {"patch_size": 1, "image_size": 16},
    "swinv2": SWIN,
    "led": {"attention_window": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"head_dim": 32, "n_groups": 1, "state_size": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"mamba_head_dim": 32, "n_groups": 1, "ssm_state_size": 16},
    "perceiver": {"d_latents": 64, "num_latents": 16, "num_self_attends_per_block": 3},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 48]},
    "xlstm": {"hidden_size": 128},
    "xmod": {"default_language": "en_XX"},
    "vibevoice_acoustic_tokenizer": {"num_filters": 4, "depths": [1, 1, 1, 1, 1, 1, 2]},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 4, "depths": [1, 1, 1, 1, 1, 1, 2]},
    "voxtral_realtime_encoder": {"sliding_window": 64},
    "yolos": {"image_size": [32, 32]},
    "zamba": {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2},
}


def model_types(mapping: str) -> tuple[str, ...]:
    """The types of a mapping.

    Args:
        mapping: ``causal``, ``masked``, ``seq2seq``, ``speech``, ``image`` (classifiers of images), or ``vision`` (encoders
            that are not in ``image``, and models with a tower for images).
    """
    types = tuple(_names(mapping))
    return (*TOWERS, *(name for name in types if name not in _names("image"))) if mapping == "vision" else types


def tiny_model(model_type: str, mapping: str, seed: int = 0) -> nn.Module:
    """A tiny model with random weights of a type, in evaluation mode; gains and biases are away from where they start."""
    made = (modeling_auto.MODEL_MAPPING_NAMES if mapping == "vision" else _names(mapping))[model_type]
    maker = getattr(library, made if isinstance(made, str) else made[0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = maker(_for_class(tiny_config(model_type, mapping), maker)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                _randomise(parameter)
    return model.requires_grad_(False)


def tiny_config(model_type: str, mapping: str) -> Any:
    """The default config of a type, shrunk; that of a decoder for the causal mapping."""
    config = _shrunk(CONFIG_MAPPING[model_type])
    if mapping == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


def tiny_inputs(model: Any, seed: int = 0, rows: int = 2) -> dict[str, Tensor]:
    """Random inputs that a tiny model takes: token ids, and pixels, a spectrogram or sound where it reads them."""
    generator = torch.Generator().manual_seed(seed)
    accepted, main = inspect.signature(model.forward).parameters, model.main_input_name
    parts = [part for name in model.config.sub_configs if (part := getattr(model.config, name, None)) is not None]
    configs = [config for part in parts for config in (part, *(getattr(part, name) for name in part.sub_configs))]
    configs = [model.config, *configs]
    ids = torch.randint(10, VOCABULARY - 10, (rows * _size(configs, "num_codebooks", 1), TOKENS), generator=generator)
    inputs = {"input_ids": ids} if main == "input_ids" else {}
    if "decoder_input_ids" in accepted:
        inputs["decoder_input_ids"] = ids
    if main.startswith("pixel_values") or hasattr(model, "logit_scale"):  # a scale of logits compares images with texts
        shape = (_size(configs, "num_channels", 3), *_pair(_size(configs, "image_size", IMAGE)))
        frames = (_size(configs, "num_frames", 1),) if "num_frames" in vars(model.config) else ()
        inputs[main if main.startswith("pixel") else "pixel_values"] = torch.randn(rows, *frames, *shape, generator=generator)
    if "spatial_shapes" in accepted:  # patches in place of pictures
        side, patch = 4, _size(configs, "patch_size", 8)
        inputs["pixel_values"] = torch.randn(rows, side * side, 3 * patch * patch, generator=generator)
        inputs["pixel_attention_mask"] = torch.ones(rows, side * side, dtype=torch.long)
        inputs["spatial_shapes"] = torch.full((rows, 2), side)
    if main == "inputs":
        inputs[main] = ids if hasattr(model, "embedding_decoder") else torch.randn(rows, 3, IMAGE, IMAGE, generator=generator)
    if main == "input_values":
        inputs[main] = torch.randn(rows, 8000, generator=generator)
    if main == "input_features":
        bins = next(size for name in MEL_BINS if (size := _size(configs, name, 0)))
        frames = 2 * _size(configs, "max_source_positions", 0)
        inputs[main] = torch.randn(
            rows, *((bins, frames) if "num_mel_bins" in vars(model.config) else (64, bins)), generator=generator
        )
    return inputs


def _size(configs: list[Any], name: str, default: int) -> Any:
    return next((vars(config)[name] for config in configs if vars(config).get(name) is not None), default)


def _pair(size: Any) -> tuple[int, int]:
    return tuple(size) if isinstance(size, list | tuple) else (size, size)


def _for_class(config: Any, maker: Any) -> Any:
    """The config or the part of it that a class of models takes, as the library's ``from_config`` chooses it."""
    wanted = maker.config_class
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return next((part for part in (config, *parts) if type(part) is wanted), config)


def _names(mapping: str) -> dict[str, Any]:
    names: dict[str, Any] = getattr(modeling_auto, f"MODEL_FOR_{MAPPINGS[mapping]}_MAPPING_NAMES")
    return names


def _shrunk(config_class: Any) -> Any:
    default = config_class()
    sizes = {field.name: _small(field) for field in dataclasses.fields(default)}
    changed = {name: value for name, value in sizes.items() if value is not None}
    if "kv_lora_rank" in changed:  # latent attention has a key and a value for every head
        changed["num_key_value_heads"] = HEADS
    changed |= _layer_lists(default, changed)
    for name in getattr(config_class, "sub_configs", {}):
        if (part := getattr(default, name, None)) is not None:
            changed[name] = _shrunk(type(part))
    return config_class(**(changed | OVERRIDES.get(config_class.model_type, {})))


def _small(field: dataclasses.Field[Any]) -> Any:
    """A small value for a field, or None if its default stays."""
    if not isinstance(field.default, int) or isinstance(field.default, bool):
        return None
    if field.name.endswith(("token_id", "token_index", "_index")):
        return None if field.default < VOCABULARY else VOCABULARY - 1 - field.default % 8
    size = next((size for pattern, size in SIZES if re.fullmatch(pattern, field.name)), None)
    return None if size is None or field.default <= 1 else size


def _layer_lists(default: Any, changed: Mapping[str, Any]) -> dict[str, Any]:
    """The count of layers, and the lists that name the kind of each, such that every kind of layer is there."""
    counted = next((name for name in LAYER_COUNTS if name in changed), None)
    count = vars(default).get(counted, 0)
    fields = {field.name for field in dataclasses.fields(default)}
    lists = {name: value for name, value in vars(default).items() if name in fields and _names_kinds(value, count)}
    kinds: dict[Any, int] = {}
    for layer, kind in enumerate(zip(*lists.values(), strict=True)):
        kinds.setdefault(kind, layer)
    if counted is None or not kinds:
        return {}
    chosen = sorted(kinds.values())
    chosen = [chosen[0]] * max(0, LAYERS - len(chosen)) + chosen
    return {counted: len(chosen)} | {name: [value[layer] for layer in chosen] for name, value in lists.items()}


def _names_kinds(value: Any, layers: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == layers > 0 and all(isinstance(kind, str) for kind in value)


def _randomise(parameter: nn.Parameter) -> None:
    """Move gains and biases away from 1 and 0, and give matrices entries of about 1/√n."""
    if parameter.numel() == max(parameter.shape, default=1):
        kept = torch.where(parameter.isfinite(), parameter, 0.0)
        parameter.copy_(kept + 0.1 * torch.randn_like(parameter))
    else:
        inputs = parameter.numel() / parameter.shape[0] if parameter.ndim > 3 else parameter.shape[-1]  # of a convolution
        parameter.copy_(torch.randn_like(parameter) / inputs**0.5)
