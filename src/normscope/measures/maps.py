"""A logit-lens trajectory in three dimensions: projections, and the share of the squared norm that each of them shows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from normscope.core.norms import SphereNorm, length, unit
from normscope.errors import MissingExtraError, require_known
from normscope.measures.readout import OutputNorm
from normscope.models import Model

if TYPE_CHECKING:
    from normscope.measures.journey import Trajectory

_FITTED = 10_000  # the first embeddings, which a map is fitted to
_CLOUD = 1500
_APART = 1e-3  # the least norm of what remains of a direction beside others
Map = Callable[[Tensor, Tensor, Tensor, int], Callable[[Tensor], Tensor]]  # of embeddings, landmarks, a path, and a seed


def places(model: Model, trajectory: "Trajectory", method: str, seed: int = 0) -> pd.DataFrame:
    """Where a map puts the hidden states of a trajectory, its landmarks, and a cloud of other tokens.

    ``sphere`` is an orthogonal projection on the three dimensions that contain the start, the end and most of the path between:
    the distance of a point from the unit sphere shows how much of it the projection misses. ``pca`` projects on the three
    directions in which embeddings differ most; ``umap`` places neighbours beside each other, starting from Laplacian eigenmaps.
    All are maps of directions θ.

    Returns:
        Rows with kind (cloud, path or word), layer, text, x, y, z and shown, the share of the squared norm that is shown.
    """
    require_known("map", method, MAPS)
    known = "vocabulary" in model.offers
    embeddings = model.embeddings[: min(_FITTED, model.vocabulary)] if known else trajectory.path[:0]
    tokens = SphereNorm(OutputNorm.of(model).kind)(embeddings)
    finite = torch.linalg.vector_norm(tokens, dim=-1).isfinite()
    path = trajectory.path
    texts = list(trajectory.table["nearest_text"]) if known else [""] * len(path)
    defined = path.isfinite().all(-1)
    ends = ((trajectory.word, trajectory.start), (trajectory.predicted, trajectory.end))
    landmarks = [(text, direction) for text, direction in ends if direction is not None]
    marks = torch.stack([direction for _, direction in landmarks]) if landmarks else path[:0]
    project = MAPS[method](tokens[finite], marks, path[defined], seed)
    every = max(1, int(finite.sum()) // _CLOUD)
    cloud = finite.nonzero().squeeze(-1)[::every]
    layers = defined.nonzero().squeeze(-1).tolist()
    parts = [
        _rows("cloud", project(tokens[cloud]), model.words(cloud), [None] * len(cloud)),
        _rows("path", project(path[defined]), [texts[layer] for layer in layers], layers),
        _rows("word", project(marks), [text for text, _ in landmarks], [None] * len(marks)),
    ]
    table = pd.concat(parts, ignore_index=True)
    table["layer"] = table["layer"].astype("Int64")
    table["shown"] = np.nan if method == "umap" else (table[["x", "y", "z"]] ** 2).sum(axis=1)
    return table


def _sphere(tokens: Tensor, marks: Tensor, path: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
    """The start, the end made orthogonal to it, and the main directions of what remains of the path."""
    axes = marks[:1]
    for mark in marks[1:]:
        remainder = mark - mark @ axes.T @ axes
        if length(remainder) > _APART:
            axes = torch.cat((axes, unit(remainder)[None]))
    remainder = path - path @ axes.T @ axes
    axes = torch.cat((axes, torch.linalg.svd(remainder, full_matrices=False).Vh[: 3 - len(axes)]))
    axes = torch.nn.functional.pad(axes, (0, 0, 0, 3 - len(axes)))  # a path of a few states has fewer directions
    return lambda points: points @ axes.T


def _pca(tokens: Tensor, marks: Tensor, path: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
    """The three main directions of the embeddings around their mean."""
    centred = tokens - tokens.mean(0)
    _, axes = torch.linalg.eigh(centred.T @ centred)
    return lambda points: points @ axes[:, -3:].flip(-1)


def _umap(tokens: Tensor, marks: Tensor, path: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
    try:
        from umap import UMAP
    except ImportError as error:
        raise MissingExtraError("map=umap needs umap-learn; pip install 'normscope[words]', or choose map=sphere") from error
    fitted = UMAP(n_components=3, metric="cosine", init="spectral", random_state=seed % 2**32, n_jobs=1)
    with _same_threads():
        fitted = fitted.fit(tokens.cpu().numpy())

    def place(points: Tensor) -> Tensor:
        with _same_threads():
            return torch.from_numpy(np.array(fitted.transform(points.cpu().numpy())))

    return place


@contextmanager
def _same_threads() -> Iterator[None]:
    """PyTorch's number of threads is restored: UMAP's compiler sets that of all libraries in the process."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


MAPS: dict[str, Map] = {"sphere": _sphere, "umap": _umap, "pca": _pca}


def _rows(kind: str, points: Tensor, texts: list[str], layers: list[int] | list[None]) -> pd.DataFrame:
    x, y, z = points.double().cpu().T.tolist()
    return pd.DataFrame({"kind": kind, "layer": pd.array(layers, dtype="Int64"), "text": texts, "x": x, "y": y, "z": z})
