"""Pictures in numbers: a norm on points in space, gain and bias on the sphere, and what one head's update does to a word."""

import math

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import NORMS, centre, layer_norm, length, rms_norm, unit
from normscope.models import Model
from normscope.words.embeddings import OutputNorm
from normscope.words.probes import updates_of

_POINTS, _CURVE = 60, 181
_GAIN, _BIAS = (1.6, 0.7), (0.6, 0.9)  # of the drawn ellipse: far enough from a circle about 0 to be seen


def norm_points(seed: int = 0) -> pd.DataFrame:
    """Random points in space as given, in the plane orthogonal to 1, and on its circle of radius √3, as LayerNorm moves them.

    Returns:
        Rows with stage, point, x, y, z.
    """
    given = 2 * torch.randn(_POINTS, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    stages = {"given": given, "centred": centre(given), "normalised": layer_norm(given)}
    return pd.DataFrame(
        [
            {"stage": stage, "point": number, "x": x, "y": y, "z": z}
            for stage, points in stages.items()
            for number, (x, y, z) in enumerate(points.tolist())
        ]
    )


def norm_curves() -> pd.DataFrame:
    """The circle of radius √2 that RMSNorm puts the plane on, the ellipse that a gain makes of it, and where a bias moves that.

    Returns:
        Rows with stage, order, x, y.
    """
    circle = _circle()
    gain, bias = (torch.tensor(values, dtype=circle.dtype) for values in (_GAIN, _BIAS))
    stages = {
        "normalised": rms_norm(circle),
        "with gain": rms_norm(circle, gain),
        "with gain and bias": rms_norm(circle, gain, bias),
    }
    return pd.concat([_curve("stage", stage, points) for stage, points in stages.items()], ignore_index=True)


def strongest_head(view: Model, layer: int, token: int) -> int:
    """The head whose update turns a word by the largest angle."""
    updates = updates_of(view, layer, torch.tensor([token], device=view.device))
    kind = OutputNorm.of(view).kind
    before = NORMS[kind](updates.states)
    after = NORMS[kind](updates.states + updates.by_head)
    return int(torch.cosine_similarity(before, after, dim=-1).argmin())


def head_update(view: Model, layer: int, head: int, token: int) -> pd.DataFrame:
    """One head's update of a word that attends to itself, in the plane of both, where nothing is hidden.

    In units of the word's length, and of the centred vectors where the norm is LayerNorm: the word on the unit circle, the word
    with the update, and that back on the circle.

    Returns:
        Rows with part, order, x, y.
    """
    updates = updates_of(view, layer, torch.tensor([token], device=view.device))
    state, update = updates.states[0].double(), updates.by_head[head, 0].double()
    if OutputNorm.of(view).kind == "layer":
        state, update = centre(state), centre(update)
    word, moved = _in_plane(state, update)
    parts = {"token": word, "sum": moved, "back on the sphere": unit(moved)}
    points = [{"part": part, "order": 0, "x": float(x), "y": float(y)} for part, (x, y) in parts.items()]
    return pd.concat([_curve("part", "circle", _circle()), pd.DataFrame(points)], ignore_index=True)


def _in_plane(state: Float[Tensor, " dim"], update: Float[Tensor, " dim"]) -> tuple[Float[Tensor, "2"], Float[Tensor, "2"]]:
    """State and state + update in the plane of both, the state as (1, 0)."""
    size = length(state)
    along = state / size
    across = update - (update @ along) * along
    moved = torch.stack((1 + (update @ along) / size[0], (length(across) / size)[0]))
    return torch.tensor([1.0, 0.0], dtype=state.dtype), moved


def _circle() -> Float[Tensor, "points 2"]:
    angle = torch.linspace(0, 2 * math.pi, _CURVE, dtype=torch.float64)
    return torch.stack((angle.cos(), angle.sin()), -1)


def _curve(column: str, name: str, points: Float[Tensor, "points 2"]) -> pd.DataFrame:
    x, y = points.T.tolist()
    return pd.DataFrame({column: name, "order": range(len(x)), "x": x, "y": y})
