"""How a model's tokens move: radius, angle turned by every layer, how clustered they are, how much they resist a turn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from normscope.audit.replay import replay_table
from normscope.core.norms import degrees_between, length, tangent, unit, visible_part
from normscope.dynamics.measures import mean_cosine
from normscope.models import AttentionStep, BlockNorm, Model, Observer, Sample
from normscope.schemes import NormKind, Scheme
from normscope.subspaces.spaces import effective_rank

Tokens = Float[Tensor, "tokens dim"]


def effective_speed(
    before: Float[Tensor, "*batch dim"],
    after: Float[Tensor, "*batch dim"],
    A: Float[Tensor, "*batch dim"],
    stride: float = 1.0,
) -> Float[Tensor, " *batch"]:
    """The speed factor s in θ̇ = (1/s) P_θ A, measured: stride·|P_θ A| / tan of the angle that the token was turned by.

    Args:
        before: a token in front of a sublayer.
        after: the token behind it.
        A: what the sublayer computed, before any norm or factor on it.
        stride: the time that the step took.
    """
    theta = unit(before)
    moved = length(tangent(theta, after)) / (after * theta).sum(-1, keepdim=True)
    return (stride * length(tangent(theta, A)) / moved).squeeze(-1)


def token_rank(x: Tokens) -> float:
    """The effective rank (Σσ²)²/Σσ⁴ of the tokens' directions: 1 if all are one, at most their number."""
    return float(effective_rank(torch.linalg.svdvals(unit(x.double()))[None]))


def measure_motion(
    view: Model, sample: Sample, schemes: Sequence[Scheme], progress: Callable[[int], None] = lambda done: None
) -> dict[str, pd.DataFrame]:
    """Where the tokens of a sample are in front of every layer, and what the layers do to them.

    The first token of every row, which many models use as a sink for attention, is left out of means; ``cosine_all`` and
    ``rank_all`` have it. Directions are those that the model's norm sees: of the centred states for LayerNorm.

    Returns:
        ``motion``: layer, radius (mean |x|), radius_low, radius_high (middle 90 % of tokens), angle (mean turn of the layer in
            degrees, empty behind the last), cosine and rank (mean cosine and effective rank), cosine_all and rank_all.
        ``writes``: layer, write (mean |x' − x|), along (its mean cosine to θ), attention (mean |A|), written (the same behind
            the output norm, if there is one), speed (median effective speed factor of attention; none where it turns the median
            token past 90°), theory (what the scheme's slots give for it), the last two if the scheme is known.
        ``replay``: scheme, layer, angle, radius, speed: what the named schemes would make of the same writes.
    """
    watched = _Watched(view, sample, progress)
    view.forward(sample, Observer(attention=watched.attend, state=watched.stand))
    tables = {"motion": pd.DataFrame(watched.motion()), "writes": pd.DataFrame(watched.writes())}
    return {**tables, "replay": watched.replay(schemes)}


@dataclass
class _Watched:
    """States and attention of a forward pass, token by token."""

    view: Model
    sample: Sample
    progress: Callable[[int], None]
    states: list[Tokens] = field(default_factory=list)
    attention: list[dict[str, float | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        norm = self.view.final_norm or self.view.read_norm(self.view.layers)
        self.kind: NormKind = "layer" if norm is not None and norm.kind == "layer" else "rms"
        self.norms = {(norm.layer, norm.sublayer, norm.slot): norm for norm in self.view.norms}
        counted = self.sample.attention_mask.clone()
        counted[:, 0] = False
        self.counted: Bool[Tensor, "rows tokens"] = counted
        self.kept = counted[self.sample.attention_mask].cpu()

    def stand(self, layer: int, x: Float[Tensor, "rows tokens dim"]) -> None:
        """Keep the directions and lengths that the norm sees."""
        self.states.append(visible_part(x, self.kind)[self.sample.attention_mask].double().cpu())

    def attend(self, step: AttentionStep) -> None:
        """What attention computes for every token, and how far that turns it."""
        mixed = (step.weights() @ step.v).transpose(1, 2)
        A = torch.einsum("rthv,hvd->rtd", mixed, step.W_O) + self.view.projections(step.layer).b_O
        x, A = step.stream[self.counted], A[self.counted]
        u = _through(self.norms.get((step.layer, "attention", "output")), A)
        lengths = {name: float(length(visible_part(y, self.kind)).mean()) for name, y in (("attention", A), ("written", u))}
        speeds = {} if self.view.scheme is None else self._speed(step.layer, x, A, u)
        self.attention.append({"layer": step.layer, **lengths, **speeds})
        self.progress(step.layer + 1)

    def _speed(self, layer: int, x: Tokens, A: Tokens, u: Tokens) -> dict[str, float | None]:
        """The effective speed factor of attention, and what theory gives for it.

        Theory's norms have radius 1; a model's have that of what they put out, which multiplies what is written and is the
        radius of a normalised stream. Theory's A is taken in front of a factor on the input, the model's behind it.
        """
        scheme = self.view.scheme
        assert scheme is not None
        stage = scheme.at(layer, self.view.layers)
        place = stage.place(layer, self.view.layers)
        step, carry = (formula(place.values) for formula in stage.attention.formulas)
        stream = self.norms.get((layer, "attention", "stream"))
        without, after = (_through(stream, carry * x + size * u) for size in (0.0, step))  # its gain turns x by itself
        seen, seen_A, seen_u, seen_after = (visible_part(y, self.kind) for y in (without, A, u, after))
        r, a = length(seen).squeeze(-1), length(seen_A).squeeze(-1)
        law = stage.attention.law
        theory = law.speed({**place.values, "r": r, "A": a}) * (r if law.radius_fixed else 1.0)
        if stage.attention.output == "norm":
            theory = theory / length(seen_u).squeeze(-1)
        elif "v" not in stage.attention.heads:
            theory = theory * stage.attention.input_factor(place.values)
        speed = float(effective_speed(seen, seen_after, seen_A).median())
        expected = float(torch.as_tensor(theory).expand_as(r).median())
        return {"speed": speed if speed > 0 else None, "theory": expected}

    def motion(self) -> list[dict[str, float | None]]:
        """A row for every place between layers."""
        rows = []
        for layer, x in enumerate(self.states):
            own = x[self.kept]
            radius = length(own).squeeze(-1)
            low, high = radius.quantile(torch.tensor([0.05, 0.95], dtype=radius.dtype)).tolist()
            following = self.states[layer + 1][self.kept] if layer + 1 < len(self.states) else None
            rows.append(
                {
                    "layer": layer,
                    "radius": float(radius.mean()),
                    "radius_low": low,
                    "radius_high": high,
                    "angle": None if following is None else float(degrees_between(own, following).mean()),
                    "cosine": float(mean_cosine(own)),
                    "rank": token_rank(own),
                    "cosine_all": float(mean_cosine(x)),
                    "rank_all": token_rank(x),
                }
            )
        return rows

    def replay(self, schemes: Sequence[Scheme]) -> pd.DataFrame:
        """What schemes would make of the same writes."""
        x = torch.stack(self.states)[:, self.kept]
        write = x[1:] - x[:-1]
        attention, written = (torch.tensor([row[name] for row in self.attention]) for name in ("attention", "written"))
        return replay_table(
            schemes,
            radius=length(x[0]).squeeze(-1),
            writes=length(write).squeeze(-1),
            along=torch.cosine_similarity(write, x[:-1], dim=-1),
            attention=attention,
            written=written,
        )

    def writes(self) -> list[dict[str, float | None]]:
        """A row for every layer."""
        rows = []
        for layer, of_attention in enumerate(self.attention):
            x, after = self.states[layer][self.kept], self.states[layer + 1][self.kept]
            write = after - x
            along = torch.cosine_similarity(write, x, dim=-1)
            rows.append({**of_attention, "write": float(length(write).mean()), "along": float(along.mean())})
        return rows


def _through(norm: BlockNorm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)
