"""What other schemes would make of a model's own writes, at the same depth."""

from collections.abc import Sequence

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.schemes import Scheme
from normscope.schemes.flow import coefficients


def replayed_turns(
    scheme: Scheme,
    radius: Float[Tensor, " tokens"],
    writes: Float[Tensor, "layers tokens"],
    along: Float[Tensor, "layers tokens"],
) -> tuple[Float[Tensor, "layers tokens"], Float[Tensor, "layers tokens"]]:
    """Angles in degrees, and radii in front of every layer, if a scheme had to carry writes of these lengths and directions.

    A write of length w whose cosine to the token is c turns a token of radius r by
    atan2(step·w√(1 − c²), carry·r + step·w·c). With a norm of outputs all writes have the mean length; with a norm of the
    stream the radius stays what it is at first; an input norm with a factor multiplies the writes by it.

    Args:
        scheme: the scheme.
        radius: |x| in front of the first layer.
        writes: the length of what each layer adds to each token.
        along: the cosine between that and the token.
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


def replay_table(
    schemes: Sequence[Scheme],
    radius: Float[Tensor, " tokens"],
    writes: Float[Tensor, "layers tokens"],
    along: Float[Tensor, "layers tokens"],
) -> pd.DataFrame:
    """Mean angle and radius by scheme and layer.

    Returns:
        Rows with scheme, layer, angle, radius.
    """
    rows = []
    for scheme in schemes:
        angles, radii = replayed_turns(scheme, radius, writes, along)
        for layer, (angle, r) in enumerate(zip(angles.mean(-1).tolist(), radii.mean(-1).tolist(), strict=True)):
            rows.append({"scheme": scheme.name, "layer": layer, "angle": angle, "radius": r})
    return pd.DataFrame(rows)
