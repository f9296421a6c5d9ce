"""A journey in three dimensions: the best that a picture can show of it, with how much that is."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from normscope.core.norms import SphereNorm, length, unit
from normscope.errors import InputError, MissingExtraError, did_you_mean
from normscope.models import Model
from normscope.words.embeddings import OutputNorm
from normscope.words.journey import Journey

_FITTED = 10_000  # the first embeddings, which a map is made for
_CLOUD = 1500
Map = Callable[[Tensor, Tensor, Tensor, int], Callable[[Tensor], Tensor]]  # of words, landmarks, a path, and a seed
_APART = 1e-3  # of a direction, that is left of it beside another


def places(view: Model, journey: Journey, method: str, seed: int = 0) -> pd.DataFrame:
    """Where a map puts the states of a journey, its landmarks, and a cloud of other words.

    ``sphere`` shows the three dimensions that hold the start, the end and most of the way between, and nothing is moved in
    them: a point lies as far inside the unit sphere as the picture shows less of it. ``pca`` shows the three directions in
    which embeddings differ most; ``umap`` lays neighbours beside each other, from Laplacian eigenmaps on. All are made of
    directions θ.

    Returns:
        Rows with kind (cloud, path or word), layer, text, x, y, z and shown, the share of the squared length that is seen.
    """
    if method not in MAPS:
        raise InputError(f"unknown map '{method}'; allowed: {', '.join(MAPS)}{did_you_mean(method, MAPS)}")
    kind = OutputNorm.of(view).kind
    words = SphereNorm(kind)(view.embeddings[: min(_FITTED, view.vocabulary)])
    known = torch.linalg.vector_norm(words, dim=-1).isfinite()
    landmarks = [(journey.word, journey.start)] + ([] if journey.end is None else [(journey.predicted, journey.end)])
    marks = torch.stack([direction for _, direction in landmarks])
    project = MAPS[method](words[known], marks, journey.path, seed)
    every = max(1, int(known.sum()) // _CLOUD)
    shown = known.nonzero().squeeze(-1)[::every]
    parts = [
        _rows("cloud", project(words[shown]), view.words(shown), [None] * len(shown)),
        _rows("path", project(journey.path), list(journey.table["nearest_text"]), list(range(len(journey.path)))),
        _rows("word", project(marks), [text for text, _ in landmarks], [None] * len(marks)),
    ]
    table = pd.concat(parts, ignore_index=True)
    table["layer"] = table["layer"].astype("Int64")
    table["shown"] = np.nan if method == "umap" else (table[["x", "y", "z"]] ** 2).sum(axis=1)
    return table


def _sphere(words: Tensor, marks: Tensor, path: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
    """The start, the end made orthogonal to it, and the main directions of what is left of the way."""
    axes = marks[:1]
    for mark in marks[1:]:
        left = mark - mark @ axes.T @ axes
        if length(left) > _APART:
            axes = torch.cat((axes, unit(left)[None]))
    left = path - path @ axes.T @ axes
    axes = torch.cat((axes, torch.linalg.svd(left, full_matrices=False).Vh[: 3 - len(axes)]))
    return lambda points: points @ axes.T


def _pca(words: Tensor, marks: Tensor, path: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
    """The three main directions of the words' embeddings about their mean."""
    centred = words - words.mean(0)
    _, axes = torch.linalg.eigh(centred.T @ centred)
    return lambda points: points @ axes[:, -3:].flip(-1)


def _umap(words: Tensor, marks: Tensor, path: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
    try:
        from umap import UMAP
    except ImportError as error:
        raise MissingExtraError("this map needs umap-learn; pip install 'normscope[words]', or choose --map sphere") from error
    made = UMAP(n_components=3, metric="cosine", init="spectral", random_state=seed % 2**32, n_jobs=1).fit(words.cpu().numpy())
    return lambda points: torch.from_numpy(np.array(made.transform(points.cpu().numpy())))


MAPS: dict[str, Map] = {"sphere": _sphere, "umap": _umap, "pca": _pca}


def _rows(kind: str, points: Tensor, texts: list[str], layers: list[int] | list[None]) -> pd.DataFrame:
    x, y, z = points.double().cpu().T.tolist()
    return pd.DataFrame({"kind": kind, "layer": pd.array(layers, dtype="Int64"), "text": texts, "x": x, "y": y, "z": z})
