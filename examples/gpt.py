"""A small GPT in the style of nanoGPT: a module of its own, which no library knows."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Config:
    """The shape of a model."""

    vocabulary: int = 256
    context: int = 64
    layers: int = 4
    heads: int = 4
    dim: int = 64
    dropout: float = 0.1


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.c_attn = nn.Linear(config.dim, 3 * config.dim)
        self.c_proj = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, tokens, dim) to the same."""
        rows, tokens, dim = x.shape
        q, k, v = (y.view(rows, tokens, self.heads, -1).transpose(1, 2) for y in self.c_attn(x).split(dim, dim=2))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(rows, tokens, dim))


class Block(nn.Module):
    """A Pre-LN block."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(config.dim), Attention(config)
        self.ln_2 = nn.LayerNorm(config.dim)
        self.mlp = nn.Sequential(
            nn.Linear(config.dim, 4 * config.dim),
            nn.GELU(),
            nn.Linear(4 * config.dim, config.dim),
            nn.Dropout(config.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(rows, tokens, dim) to the same."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Token ids (rows, tokens) to logits, and a loss if there are targets."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(config.vocabulary, config.dim), nn.Embedding(config.context, config.dim)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, config.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5 if name.endswith("c_proj.weight") else 0.02)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits (rows, tokens, vocabulary) and the loss."""
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
