"""A trained language model as one of transformers: a family is chosen by its slots, and what it has no place for is folded.

A factor on a norm of the input and every gain fold into the norm's weight; a step, learned or not, into the sublayer's last
matrix or the weight of its output norm; the scale of logits into queries. So Llama holds not only ``pre`` but all schemes with
its norms: LN-Scaling, LayerScale, updates times 1/√T.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normscope.core.norms import EPSILON
from normscope.errors import InputError
from normscope.schemes import Scheme, Slots
from normscope.transformer.config import TransformerConfig
from normscope.transformer.layers import Attention, FeedForward, Norm
from normscope.transformer.model import Sublayer, Transformer

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
Places = frozenset[tuple[str, str]]  # (sublayer, slot) of every norm in a block


@dataclass(frozen=True)
class Family:
    """A family of language models in transformers, with the slots of its blocks.

    Attributes:
        name: the prefix of its classes.
        norms: the name of the norm in each place of a block.
        heads: which heads it normalises.
        kind: the kind of its norms.
        capped: whether it can cap its logits.
        offset: what its norms add to their weights.
        embedding: the factor that it puts on embeddings, as a power of its width.
        head_free: whether heads · head may differ from its width.
        settings: what its configuration needs beside the shape, from the shape.
    """

    name: str
    norms: dict[tuple[str, str], str]
    heads: str = "none"
    kind: str = "rms"
    capped: bool = False
    offset: float = 0.0
    embedding: float = 0.0
    head_free: bool = True
    settings: Callable[[TransformerConfig], dict[str, Any]] = field(default=lambda config: {}, compare=False)


def _full(config: TransformerConfig) -> dict[str, Any]:
    return {"layer_types": ["full_attention"] * config.layers}


def _gemma(config: TransformerConfig) -> dict[str, Any]:
    return {
        "hidden_activation": "silu",
        "query_pre_attn_scalar": config.head,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": config.scheme.attention.score_rule.cap,
        **_full(config),
    }


def _gemma3(config: TransformerConfig) -> dict[str, Any]:
    return {**_gemma(config), "rope_parameters": {"full_attention": dict(_ROPE), "sliding_attention": dict(_ROPE)}}


_INPUTS = {("attention", "input"): "input_layernorm", ("feedforward", "input"): "post_attention_layernorm"}
_INNER = {("attention", "inner"): "self_attn.attn_sub_norm", ("feedforward", "inner"): "mlp.ffn_sub_norm"}
_OUTPUTS = {("attention", "output"): "post_attention_layernorm", ("feedforward", "output"): "post_feedforward_layernorm"}
_BOTH = {**_OUTPUTS, ("attention", "input"): "input_layernorm", ("feedforward", "input"): "pre_feedforward_layernorm"}
FAMILIES = (
    Family("Llama", _INPUTS),
    Family("Qwen3", _INPUTS, heads="qk"),
    Family("BitNet", _INPUTS | _INNER, head_free=False, settings=lambda config: {"hidden_act": "silu"}),
    Family("Exaone4", _OUTPUTS, heads="qk", settings=lambda config: {"sliding_window": None, **_full(config)}),
    Family("Gemma2", _BOTH, capped=True, offset=1.0, embedding=0.5, settings=_gemma),
    Family("Gemma3", _BOTH, heads="qk", offset=1.0, embedding=0.5, settings=_gemma3),
    Family(
        "StableLm",
        _INPUTS,
        kind="layer",
        head_free=False,
        settings=lambda config: {"rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0}},
    ),
)


def family_of(config: TransformerConfig) -> Family:
    """The family whose blocks have these slots.

    Raises:
        InputError: if there is none; it names the slots and settings that no family has.
    """
    alone = list(_without_family(config))
    if alone:
        raise InputError(f"no family of transformers that normscope writes has {'; '.join(dict.fromkeys(alone))}")
    stage = config.scheme.at(0, config.layers)
    places, cap = _places(stage), stage.attention.score_rule.cap
    for family in FAMILIES:
        same = (Places(family.norms), family.heads, family.kind) == (places, stage.attention.heads, stage.norm)
        if same and (cap is None or family.capped) and (family.head_free or config.heads * config.head == config.dim):
            return family
    norms = ", ".join(f"{sublayer}.{slot}" for sublayer, slot in sorted(places)) or "none"
    scores = "" if cap is None else f", scores={stage.attention.scores}"
    raise InputError(
        f"no family of transformers that normscope writes has together: norms in {norms}; heads={stage.attention.heads}, "
        f"norm={stage.norm}{scores}, heads·head={config.heads * config.head} of dim={config.dim}"
    )


def _without_family(config: TransformerConfig) -> Iterator[str]:
    """The slots and settings that no family has, whatever the others are."""
    stages = [config.scheme.at(layer, config.layers) for layer in range(config.layers)]
    if len({(_places(stage), stage.attention.heads, stage.norm, stage.attention.scores) for stage in stages}) > 1:
        yield "slots that change with depth"
    for stage in stages:
        for name in ("attention", "feedforward"):
            yield from (f"{name}.{text}" for text in _slots_without(getattr(stage, name), config))
        if stage.weights != "free":
            yield f"weights={stage.weights}"
        if stage.pointwise:
            yield f"norm={stage.norm}"
    wanted = {"positions": "rope", "activation": "swiglu", "biases": False, "readout": (), "encoder_layers": 0}
    yield from (f"{key}={getattr(config, key)!r}" for key, value in wanted.items() if getattr(config, key) != value)
    if config.dim % config.heads:
        yield f"heads={config.heads} that do not divide dim={config.dim}"
    kinds = {"final_norm": config.final_norm, "feedforward_norm": config.feedforward_kind(stages[0])}
    if not stages[0].pointwise:
        yield from (f"{key}={kind} beside norm={stages[0].norm}" for key, kind in kinds.items() if kind != stages[0].norm)


def _slots_without(slots: Slots, config: TransformerConfig) -> Iterator[str]:
    values = {name: str(getattr(slots, name)) for name in ("gate", "stream")}
    yield from (f"{name}={value}" for name, value in values.items() if value != "none")
    if slots.output == "tangent":
        yield "output=tangent"
    if slots.heads not in ("none", "qk"):
        yield f"heads={slots.heads}"
    if slots.score_rule.sink is not None or slots.score_rule.temperature is not None:
        yield f"scores={slots.scores}"
    carry = slots.formulas[1]
    if carry.names or carry({}) != 1:
        yield f"carry={carry.text}"


def _places(stage: Scheme) -> Places:
    """Where a block of the stage has norms."""
    both = (("attention", stage.attention), ("feedforward", stage.feedforward))
    inputs = {(name, "input") for name, slots in both if slots.reads_norm}
    later = {(name, slot) for name, slots in both for slot in ("inner", "output") if getattr(slots, slot) == "norm"}
    return Places(inputs | later)


@torch.no_grad()
def hugging_face_model(model: Transformer, context: int, end: int | None = None) -> Any:
    """The same model as one of transformers, a ``PreTrainedModel`` in float32 on the CPU.

    Args:
        model: a trained language model.
        context: the most tokens that it was trained on.
        end: the id of the token that ends a document.

    Raises:
        InputError: if no family has its slots.
    """
    import transformers

    config, family = model.config, family_of(model.config)
    weights = dict(_weights(model, family))
    tied = torch.equal(weights["model.embed_tokens.weight"], weights["lm_head.weight"])
    shape = {
        "vocab_size": config.vocabulary,
        "hidden_size": config.dim,
        "intermediate_size": config.feedforward,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "head_dim": config.head,
        "max_position_embeddings": context,
        "rms_norm_eps": EPSILON,
        "layer_norm_eps": EPSILON,
        "rope_parameters": dict(_ROPE),
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": None,
        **family.settings(config),
    }
    middle = "Text" if hasattr(transformers, f"{family.name}TextConfig") else ""
    settings = getattr(transformers, f"{family.name}{middle}Config")
    known = {key: value for key, value in shape.items() if hasattr(settings, key) or key == "head_dim"}
    written = getattr(transformers, f"{family.name}ForCausalLM")(settings(**known))
    missing, unexpected = written.load_state_dict(weights, strict=False)
    if unexpected or any(not name.endswith("norm.bias") for name in missing):  # LayerNorm's biases start and stay at 0
        raise RuntimeError(f"{family.name} has weights {missing} that are not there, and not {unexpected}")
    return written.eval()


def save_hugging_face(folder: Path, written: Any) -> None:
    """Write ``config.json`` and ``model.safetensors``, which ``AutoModelForCausalLM.from_pretrained`` reads."""
    from safetensors.torch import save_file

    written.config.architectures, written.config.dtype = [type(written).__name__], torch.float32
    written.config.save_pretrained(folder)
    weights = {name: value for name, value in written.state_dict().items() if name != "lm_head.weight"}
    if not written.config.tie_word_embeddings:
        weights["lm_head.weight"] = written.lm_head.weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _weights(model: Transformer, family: Family) -> Iterator[tuple[str, Tensor]]:
    """The family's weights by their names."""
    embed = model.embed
    yield (
        "model.embed_tokens.weight",
        embed.types * embed.type_scale.factor * embed.scale.factor / (model.config.dim**family.embedding),
    )
    yield "lm_head.weight", model.unembedding.T
    assert isinstance(model.readout.norm, Norm)
    assert model.readout.norm.gain is not None
    yield "model.norm.weight", model.readout.norm.gain() - family.offset
    for layer, block in enumerate(model.decoder):
        at = f"model.layers.{layer}"
        for name in ("attention", "feedforward"):
            for key, value in _sublayer(getattr(block, name), name, family):
                yield f"{at}.{key}.weight", value.contiguous()


def _sublayer(sublayer: Sublayer, name: str, family: Family) -> Iterator[tuple[str, Tensor]]:
    """The weights of a sublayer; what scales its input and its update is in norms or matrices."""
    f, (step, _, factor) = sublayer.f, sublayer.values()
    read, written = (
        torch.as_tensor(x).float() for x in (factor * sublayer.read_scale.factor, step * sublayer.write_scale.factor)
    )
    gains = _input_gains(f)  # (1, dim) or (3, dim)
    inputs, outputs = (family.norms.get((name, slot)) for slot in ("input", "output"))
    if inputs is not None:
        in_norm = gains[0] if len(gains) == 1 else torch.ones_like(gains[0])
        yield inputs, read * in_norm - family.offset
        read, gains = torch.tensor(1.0), gains if len(gains) > 1 else torch.ones_like(gains)
    if outputs is not None:
        assert isinstance(sublayer.output, Norm)
        assert sublayer.output.gain is not None
        yield outputs, written * sublayer.output.gain() - family.offset
        written = torch.tensor(1.0)
    if (inner := family.norms.get((name, "inner"))) is not None:
        assert isinstance(f.inner, Norm)
        assert f.inner.gain is not None
        yield inner, f.inner.gain().flatten() - family.offset
    last = written.reshape(-1, 1)
    if isinstance(f, Attention):
        yield from _attention(f, read * gains, last, family)
    else:
        up, gate = ((read * gains[0])[:, None] * f.W_in).T.chunk(2)
        yield from (("mlp.up_proj", up), ("mlp.gate_proj", gate), ("mlp.down_proj", last * f.W_out.T))


def _attention(f: Attention, gains: Tensor, last: Tensor, family: Family) -> Iterator[tuple[str, Tensor]]:
    scale = f.score_scale.factor * math.sqrt(f.W_QKV.shape[-1])
    matrices = dict(zip("qkv", (gains.T[:, :, None, None] * f.W_QKV).flatten(2).unbind(1), strict=True))
    if family.heads == "none":
        matrices["q"] = scale * matrices["q"]
    for letter, norm in f.norms.items():
        assert isinstance(norm, Norm)
        assert norm.gain is not None
        gain = norm.gain()
        if not torch.equal(gain, gain[:1].expand_as(gain)):
            raise InputError(f"{family.name} has one gain for all heads; train with shared_gains=True to export heads={letter}")
        yield f"self_attn.{letter}_norm", (scale if letter == "q" else 1.0) * gain[0] - family.offset
    yield from ((f"self_attn.{letter}_proj", matrix.T) for letter, matrix in matrices.items())
    yield "self_attn.o_proj", last * f.W_O.flatten(0, 1).T


def _input_gains(f: Attention | FeedForward) -> Tensor:
    gains = f.input_gains if isinstance(f, Attention) else f.input_gain
    if gains is None:
        return torch.ones(1, f.W_QKV.shape[0] if isinstance(f, Attention) else f.W_in.shape[0])
    values: Tensor = gains()
    return values.reshape(-1, values.shape[-1])
