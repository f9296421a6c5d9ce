"""Model types of the library, each opened and compared with plain torch; ``benchmarks/coverage.py`` does so for all of them."""

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from helpers.tiny_models import MAPPINGS, model_types, tiny_inputs, tiny_model
from normscope.schemes import NAMED

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def coverage() -> ModuleType:
    """The benchmark, under a name that no package has; its folder is no place for imports afterwards (numba's of coverage)."""
    spec = spec_from_file_location("coverage_benchmark", BENCHMARKS / "coverage.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["coverage_benchmark"] = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        spec.loader.exec_module(module)
        import_module("reference")  # which its functions import
    return module


@pytest.mark.parametrize(
    ("mapping", "kind", "streams", "scheme"),
    [
        ("causal", "gpt_oss", 1, "sink"),
        ("causal", "deepseek_v3", 1, "pre"),
        ("causal", "jamba", 1, "pre"),
        ("causal", "mamba", 1, "pre"),
        ("causal", "bloom", 1, "pre"),
        ("causal", "falcon", 1, "pre"),
        ("causal", "qwen3_next", 1, "gated+qk, pre"),
        ("masked", "albert", 1, "post"),
        ("masked", "modernbert", 1, "pre, unnamed"),  # the embedding is normalised already
        ("seq2seq", "t5", 2, "pre"),
        ("speech", "whisper", 2, "pre"),
        ("image", "dinov2", 1, "layerscale"),
        ("vision", "siglip", 2, "pre"),
    ],
)
def test_a_type_is_opened_and_agrees_with_plain_torch(
    coverage: ModuleType, mapping: str, kind: str, streams: int, scheme: str
) -> None:
    rows = coverage.rows_of(mapping, kind)
    assert len(rows) == streams
    for row in rows:
        assert (row.raised, row.refused, row.wrong) == ("", "", ""), row
        assert row.opened, row
        assert row.attends or not row.softmax, row
        assert row.scheme == scheme, row


def test_streams_of_patches_agree_where_rows_have_different_numbers_of_patches(coverage: ModuleType) -> None:
    """A patch without bytes attends to all bytes alike, as the mask of the model says."""
    rows = coverage.rows_of("causal", "blt")
    assert len(rows) == 6
    assert all(row.opened for row in rows), [(row.stream, row.states) for row in rows]
    attended = [row for row in rows if row.attention]
    assert len(attended) == 4
    assert all(row.attends for row in attended), [(row.stream, row.qkv) for row in attended]


def test_a_tiny_model_shows_every_kind_of_layer_and_has_no_plain_gain() -> None:
    assert all(len(model_types(mapping)) > 10 for mapping in MAPPINGS)
    model = tiny_model("qwen3_next", "causal", seed=1)
    kinds = {type(child).__name__ for block in model.model.layers for child in block.children()}  # type: ignore[union-attr]
    assert {"Qwen3NextAttention", "Qwen3NextGatedDeltaNet"} <= kinds
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        assert parameter.unique().numel() > 0.9 * parameter.numel(), name
    again = tiny_model("qwen3_next", "causal", seed=1)
    with torch.no_grad():
        assert torch.equal(model(**tiny_inputs(model)).logits, again(**tiny_inputs(again)).logits)


def test_the_reference_contradicts_wrong_schemes(coverage: ModuleType) -> None:
    from reference import contradiction, reference  # type: ignore[import-not-found]

    right = {"llama": "pre", "gemma2": "peri", "bert": "post", "olmo2": "res-post"}
    for kind, scheme in right.items():
        model: nn.Module = tiny_model(kind, "causal")
        plain = reference(model, lambda model=model: model(**tiny_inputs(model)))
        block = max(plain.lists(model).values(), key=len)[1]
        for other in ("pre", "peri", "post", "res-post", "none", "deepnorm"):
            wrong = contradiction(NAMED[other], plain, block, 1, 3, 2)
            assert (wrong == "") == (other == scheme), (kind, other, wrong)
