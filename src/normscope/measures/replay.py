"""A model's recorded updates, replayed through the norm placements of other schemes without retraining."""

from collections.abc import Sequence

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.schemes import Scheme, derive
from normscope.schemes.update import coefficients

_COLUMNS = ["scheme", "layer", "angle", "radius", "speed"]


def replayed_turns(
    scheme: Scheme,
    radius: Float[Tensor, " tokens"],
    writes: Float[Tensor, "layers tokens"],
    along: Float[Tensor, "layers tokens"],
) -> tuple[Float[Tensor, "layers tokens"], Float[Tensor, "layers tokens"]]:
    """Angles in degrees, and norms before every layer, if a scheme applied updates of these lengths and directions.

    An update of length w whose cosine to the token is c rotates a token of norm r by
    atan2(step·w√(1 − c²), carry·r + step·w·c). With an output norm all updates have the mean length; with a stream norm r stays
    what it is before layer 0; an input norm with a factor multiplies the updates by it.

    Args:
        scheme: the scheme.
        radius: |x| before layer 0.
        writes: the length of the update of each layer to each token.
        along: the cosine between the update and the token.
    """
    depth, mean = len(writes), writes.mean()
    angles, radii, r = [], [], radius
    for t, (w, c) in enumerate(zip(writes, along, strict=True)):
        stage = scheme.at(t, depth)
        slots = coefficients(stage.attention, stage.norm, stage.place(t, depth))
        w = mean.expand_as(w) if slots.output_norm else w * (slots.input_factor if slots.reads_norm else 1.0)
        across, forward = slots.step * w * (1 - c.square()).clamp(min=0).sqrt(), slots.carry * r + slots.step * w * c
        radii.append(r)
        angles.append(torch.atan2(across, forward).rad2deg())
        r = r if slots.stream_norm else torch.hypot(across, forward)
    return torch.stack(angles), torch.stack(radii)


def replayed_speeds(
    scheme: Scheme, radius: Float[Tensor, " layers"], attention: Float[Tensor, " layers"], written: Float[Tensor, " layers"]
) -> Float[Tensor, " layers"]:
    """The speed factor s of attention by the scheme's slots, at these norms and lengths of what attention computes and writes.

    Norms in theory have radius 1. Here a normalised stream has the given norm, and normalised outputs the mean length of what
    is written. s is that of the A which attention computes; where the model normalises it, schemes get the normalised one.
    """
    depth, mean = len(radius), float(written.mean())
    speeds = []
    for t, (r, w) in enumerate(zip(radius.tolist(), written.tolist(), strict=True)):
        stage = scheme.at(t, depth)
        law, place = derive(stage.attention), stage.place(t, depth)
        speed = law.speed({**place.values, "r": r, "A": w}) * (r if law.radius_fixed else 1.0)
        speeds.append(speed / mean if stage.attention.output == "norm" else speed)
    return torch.tensor(speeds, dtype=torch.float64) * attention / written


def replay_table(
    schemes: Sequence[Scheme],
    radius: Float[Tensor, " tokens"],
    writes: Float[Tensor, "layers tokens"],
    along: Float[Tensor, "layers tokens"],
    attention: Float[Tensor, " layers"],
    written: Float[Tensor, " layers"],
) -> pd.DataFrame:
    """Mean angle and norm by scheme and layer, and the speed factor that follows from them.

    Args:
        schemes: the schemes.
        radius: as for ``replayed_turns``.
        writes: likewise.
        along: likewise.
        attention: the mean length of what attention computes in every layer.
        written: the same after the model's output norm, if it has one.

    Returns:
        Rows with scheme, layer, angle, radius, speed.
    """
    tables = []
    for scheme in schemes:
        angles, radii = (values.mean(-1) for values in replayed_turns(scheme, radius, writes, along))
        columns = {"angle": angles, "radius": radii, "speed": replayed_speeds(scheme, radii, attention, written)}
        values = {name: column.tolist() for name, column in columns.items()}
        tables.append(pd.DataFrame({"scheme": scheme.name, "layer": range(len(angles)), **values}))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=_COLUMNS)
