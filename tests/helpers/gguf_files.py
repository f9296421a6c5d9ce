"""Tiny GGUF files: a Llama of random weights with a byte-level vocabulary."""

from pathlib import Path
from typing import Any

import numpy as np

WIDTH, LAYERS, HEADS, INNER = 32, 2, 4, 48
SPECIAL = ("<s>", "</s>", "<unk>")


def byte_tokens() -> list[str]:
    """Special tokens, and every printable ASCII character with the letter that stands for a blank."""
    return [*SPECIAL, *map(chr, range(33, 127)), "Ġ", "Ċ", "th", "an"]


def write_llama(path: Path, kind: str = "gpt2", **flags: bool) -> Path:
    """A GGUF file whose tokenizer, byte-level or SentencePiece (``llama``), has flags such as ``add_bos_token=True``."""
    from gguf import GGUFWriter

    tokens, drawn = byte_tokens(), np.random.default_rng(0)
    if kind == "llama":
        tokens = [token.replace("Ġ", "▁") for token in tokens]
    writer: Any = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model(kind)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    if kind == "gpt2":
        writer.add_token_merges(["t h", "a n"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    square, wide = (WIDTH, WIDTH), (INNER, WIDTH)
    shapes = {"token_embd": (len(tokens), WIDTH), "output": (len(tokens), WIDTH), "output_norm": (WIDTH,)}
    for layer in range(LAYERS):
        block = {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,), "ffn_gate": wide, "ffn_up": wide, "ffn_down": wide[::-1]}
        block |= {f"attn_{part}": square for part in ("q", "k", "v", "output")}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    for name, shape in shapes.items():
        weight = np.ones(shape) if name.endswith("norm") else 0.2 * drawn.standard_normal(shape)
        writer.add_tensor(f"{name}.weight", weight.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
