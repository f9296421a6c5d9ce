"""A model's recorded updates, replayed through the norm placements of other schemes without retraining."""

import math
from collections.abc import Sequence

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import SphereNorm, degrees_between, length
from normscope.schemes import Scheme
from normscope.schemes.law import MEASURED
from normscope.schemes.update import Update

_SMALLEST = 1e-30  # what is not there at all still has a direction
_COLUMNS = ["scheme", "layer", "angle", "radius", "speed"]


def replayed_turns(
    scheme: Scheme,
    radius: Float[Tensor, " tokens"],
    writes: Float[Tensor, "layers tokens"],
    along: Float[Tensor, "layers tokens"],
    depth: int | None = None,
) -> tuple[Float[Tensor, "layers tokens"], Float[Tensor, "layers tokens"]]:
    """Angles in degrees, and norms before every layer, if a scheme updated tokens with what a model's layers added.

    Each token is carried through the scheme's update in the plane of its direction and of what is added. A norm of the stream
    keeps the norm that the token has when it first meets one; a norm of outputs gives all of them their mean norm; a factor on
    the input multiplies what is added.

    Args:
        scheme: the scheme.
        radius: |x| before the first layer.
        writes: the norm of what each layer adds to each token.
        along: the cosine between that and the token.
        depth: the number of layers of the model, if more than were recorded.
    """
    depth, mean = depth or len(writes), float(writes.mean())
    angles, radii = [], []
    x = torch.stack((radius, torch.zeros_like(radius)), -1)
    for t, (size, cosine) in enumerate(zip(writes, along, strict=True)):
        stage, radius = scheme.at(t, depth), length(x)
        norms = {"input": SphereNorm(), "output": SphereNorm(radius=mean), "stream": SphereNorm(radius=radius)}
        update = Update.of(stage.attention, stage.place(t, depth), norms)
        x = torch.cat((radius, torch.zeros_like(radius)), -1)
        added = size.clamp(min=_SMALLEST)[:, None] * torch.stack((cosine, (1 - cosine.square()).clamp(min=0).sqrt()), -1)
        moved = update.state(x, update.factor * added)
        radii.append(radius.squeeze(-1))
        angles.append(degrees_between(x, moved))
        x = moved
    return torch.stack(angles), torch.stack(radii)


def replayed_speeds(
    scheme: Scheme,
    radius: Float[Tensor, " layers"],
    attention: Float[Tensor, " layers"],
    written: Float[Tensor, " layers"],
    depth: int | None = None,
) -> Float[Tensor, " layers"]:
    """The speed factor s of attention by the scheme's slots, at these norms and lengths of what attention computes and writes.

    Norms in theory have radius 1. Here a normalised stream has the given norm, and normalised outputs the mean length of what
    is written. s is that of the A which attention computes; where the model normalises it, schemes get the normalised one.
    """
    depth, mean = depth or len(radius), float(written.nanmean())
    speeds = []
    for t, (r, w) in enumerate(zip(radius.tolist(), written.tolist(), strict=True)):
        stage = scheme.at(t, depth)
        law, place = stage.law_of(stage.attention), stage.place(t, depth)
        speed = law.speed({**place.values, **MEASURED, "r": r, "A": w}) * (r if law.radius_fixed else 1.0)
        if stage.attention.output == "norm":
            speed = speed / mean if mean else math.nan
        speeds.append(speed)
    return torch.tensor(speeds, dtype=torch.float64) * attention / written


def replay_table(
    schemes: Sequence[Scheme],
    radius: Float[Tensor, " tokens"],
    writes: Float[Tensor, "layers tokens"],
    along: Float[Tensor, "layers tokens"],
    attention: Float[Tensor, " layers"],
    written: Float[Tensor, " layers"],
    depth: int | None = None,
) -> pd.DataFrame:
    """Mean angle and norm by scheme and layer, and the speed factor that follows from them.

    Args:
        schemes: the schemes.
        radius: as for ``replayed_turns``.
        writes: likewise.
        along: likewise.
        attention: the mean length of what attention computes in every layer.
        written: the same after the model's output norm, if it has one; NaN where either is unknown.
        depth: as for ``replayed_turns``.

    Returns:
        Rows with scheme, layer, angle, radius, speed.
    """
    tables = []
    for scheme in schemes:
        angles, radii = (values.mean(-1) for values in replayed_turns(scheme, radius, writes, along, depth))
        columns = {"angle": angles, "radius": radii, "speed": replayed_speeds(scheme, radii, attention, written, depth)}
        values = {name: column.tolist() for name, column in columns.items()}
        tables.append(pd.DataFrame({"scheme": scheme.name, "layer": range(len(angles)), **values}))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=_COLUMNS)
