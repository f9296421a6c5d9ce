"""Audits of models that offer less than a transformer of text: what they offer is measured, the rest listed with a reason."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normscope as ns
from helpers.tiny_models import tiny_model
from normscope.errors import InputError
from normscope.experiments.audit import Audit
from normscope.experiments.result import Result
from normscope.measures.base import Subject
from normscope.models import NOTHING, Model, Sample, open_model

STREAM = {"degenerate", "growth", "updates", "rotation", "clustering", "massive"}
ATTENTION = {"first_token", "spread", "collapse", "sparsity"}
MATRICES = {"interference", "spheres", "angles", "rank"}


class Average(nn.Linear):
    """W(mean of the tokens so far)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])


class Mixer(nn.Module):
    """x + Average(x), then x + MLP(x), both of normalised x: no attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix_norm, self.mix = nn.LayerNorm(width), Average(width, width)
        self.mlp_norm, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.mix_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Causal attention of ``heads`` queries with ``groups`` keys."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size, self.shared = width // heads, heads // groups
        self.q_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.k_proj, self.v_proj = nn.Linear(width, groups * self.size), nn.Linear(width, groups * self.size)

    def forward(self, x: Tensor) -> Tensor:
        parts = (
            project(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = (part.repeat_interleave(times, 1) for part, times in zip(parts, (1, self.shared, self.shared), strict=True))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Attending(Mixer):
    """The same with attention."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__(width)
        self.mix = Attention(width, heads, groups)  # type: ignore[assignment]


class Reader(nn.Module):
    """A language model of some blocks."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def sample_of(model: Model, rows: int = 2, tokens: int = 12) -> Sample:
    read = torch.randint(1, 40, (rows, tokens), generator=torch.Generator().manual_seed(0))
    targets = torch.cat((read[:, 1:], torch.full((rows, 1), NOTHING)), 1)
    return Sample(read, targets, torch.ones_like(read).bool())


def pictures(positions: int, size: int) -> Sample:
    features = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    numbers = torch.arange(positions).expand(2, -1)
    return Sample(numbers, torch.full_like(numbers, NOTHING), torch.ones_like(numbers).bool(), features=features)


@cache
def opened(name: str) -> Model:
    mapping = {"swin": "image", "vit": "image", "t5": "seq2seq"}.get(name, "causal")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = {
            "module": lambda: Reader(*(Mixer(16) for _ in range(3))).eval(),
            "heads differ": lambda: Reader(Attending(16, 2, 1), Mixer(16), Attending(16, 4, 2)).eval(),
        }
        return open_model(made[name]() if name in made else tiny_model(name, mapping))


@cache
def audited(name: str) -> Result:
    model = opened(name)
    sample = {"swin": lambda: pictures(256, 64), "vit": lambda: pictures(17, 32)}.get(name, lambda: sample_of(model))()
    return Audit(model=model, fresh=True).measure(Subject(model, sample))


def skipped(result: Result) -> dict[str, str]:
    """The measures that were not taken at all, with the reasons."""
    table = result.tables["skipped"]
    return dict(table[table["layer"].isna()].set_index("measure")["reason"])


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("module", {"attention": ATTENTION | MATRICES}),
        ("mamba", {"attention": ATTENTION | MATRICES}),
        ("rwkv", {"attention": ATTENTION | MATRICES}),
        ("gpt_neox_japanese", {"sublayers": {"speed"}}),
        ("jamba", {}),
        ("vit", {"predictions": {"removal"}, "vocabulary": {"journey"}}),
        ("swin", {"attention": ATTENTION | MATRICES, "predictions": {"removal"}, "vocabulary": {"journey"}}),
        ("t5", {}),
    ],
)
def test_an_audit_measures_what_a_model_offers_and_says_why_not_the_rest(name: str, missing: dict[str, set[str]]) -> None:
    found, model = audited(name), opened(name)
    reasons = skipped(found)
    for capability, measures in missing.items():
        assert capability not in model.offers
        assert {measure for measure, reason in reasons.items() if reason.startswith(f"needs {capability}: ")} == measures
    assert not STREAM & set(reasons)
    motion = found.tables["motion"]
    assert motion["layer"].tolist() == list(range(model.layers + 1))
    assert motion[["radius", "cosine", "rank"]].notna().all(axis=None)
    between = 0 if "sublayers" in model.offers else int((motion["width"].diff() > 0).sum())  # where a pyramid changes its width
    assert motion["angle"].notna().sum() == model.layers - between
    page, printed = found.to_html(), "\n".join(map(str, Audit.terminal(found)))
    for reason in set(reasons.values()):
        assert f"({reason})." in printed
        assert reason.replace("'", "&#39;") in page
    assert "0 head" not in printed


def test_a_stream_of_a_module_is_measured_as_hooks_see_it() -> None:
    model = opened("module")
    states: list[Tensor] = []
    handles = [block.register_forward_pre_hook(lambda module, args: states.append(args[0])) for block in model.model.blocks]
    with torch.no_grad():
        model.model(sample_of(model).tokens)
    for handle in handles:
        handle.remove()
    motion = audited("module").tables["motion"]
    x = [state[:, 1:].flatten(0, 1).double() for state in states]
    for layer, state in enumerate(x):
        assert motion["radius"][layer] == pytest.approx(float(state.norm(dim=-1).mean()), rel=1e-5)
    angle = torch.nn.functional.cosine_similarity(x[0], x[1]).acos().rad2deg().mean()
    assert motion["angle"][0] == pytest.approx(float(angle), rel=1e-5)
    updates = audited("module").tables["updates"]
    assert set(updates["sublayer"]) == {"block", "mixer", "feedforward"}
    with torch.no_grad():
        mixed = model.model.blocks[0].mix(model.model.blocks[0].mix_norm(states[0]))
    expected = float((mixed.norm(dim=-1) / states[0].norm(dim=-1))[:, 1:].mean())
    row = updates[(updates["layer"] == 0) & (updates["sublayer"] == "mixer")]
    assert row["size"].item() == pytest.approx(expected, rel=1e-4)


def test_layers_without_attention_have_no_rows_of_it_and_are_listed() -> None:
    found, model = audited("jamba"), opened("jamba")
    for table in ("spread", "sparsity", "interference", "rank"):
        assert set(found.tables[table]["layer"].dropna()) == set(model.attention_layers) == {1, 3}
    table = found.tables["skipped"]
    assert set(table[table["measure"] == "spread"]["layer"]) == {0, 2}
    listed = next(str(shown) for shown in Audit.terminal(found) if str(shown).startswith("Not measured in layers 0, 2: "))
    assert "spread, collapse" in listed
    drawn = found.tables["blocks"]
    assert drawn["sublayer"].tolist() == ["attention or mixer", "feedforward"]


def test_heads_may_differ_between_layers() -> None:
    found, model = audited("heads differ"), opened("heads differ")
    assert model.attention_layers == (0, 2)
    assert found.tables["rank"].groupby("layer")["head"].max().to_dict() == {0: 1, 2: 3}
    assert found.tables["rank"].groupby("layer")["width"].first().to_dict() == {0: 8, 2: 4}
    spheres = found.tables["spheres"].query("place == 'before' and side == 'keys'")
    keys = next(finding for finding in found.findings if finding.figure == "spheres-keys")
    assert spheres.groupby("layer")["shared"].first().to_dict() == {0: 2, 2: 2}
    assert "of 3 KV heads" in keys.text
    attention = model.model.blocks[2].mix
    W_QK = attention.q_proj.weight[:4].T.double() @ attention.k_proj.weight[:4].double()
    largest = found.tables["rank"].query("layer == 2 and head == 0")["largest"].item()
    assert largest == pytest.approx(float(torch.linalg.matrix_norm(W_QK.detach(), 2)), rel=1e-4)
    drawn = {figure.title for figure in found.figures.values()}
    assert "Participation ratio of W_QK" in drawn


def test_a_pyramid_is_measured_in_every_stage() -> None:
    """Between stages of Swin a layer outside the blocks halves positions and doubles channels."""
    motion = audited("swin").tables["motion"]
    assert motion["width"].tolist() == [24, 24, 48, 48, 48]
    growth = next(finding for finding in audited("swin").findings if finding.figure == "radius")
    assert "24 channels" in growth.text
    assert "48" in growth.text


def test_a_model_of_pixels_reads_positions_and_no_tokens() -> None:
    found = audited("vit")
    assert "34 positions" in found.summary
    assert ("positions read", "34") in Audit.facts(found)
    assert "text" not in found.tables["activations"] or found.tables["activations"]["text"].isna().all()


def test_cross_attention_is_a_sublayer_with_updates() -> None:
    updates = audited("t5").tables["updates"]
    assert updates.groupby("layer")["sublayer"].agg(tuple).tolist() == [("attention", "cross", "feedforward", "block")] * 3


def test_models_are_compared_by_what_they_have_in_common() -> None:
    found = ns.compare(opened("module"), opened("mamba"), token_ids=list(range(1, 13)), fresh=True, progress=False)
    quantities = set(found.tables["quantities"]["name"])
    assert {"radius", "angle", "update", "cosine", "massive", "removal"} <= quantities
    assert not {"spread", "interference"} & quantities


@pytest.mark.parametrize(
    "command",
    [
        lambda model: ns.stability(model, token_ids=list(range(1, 13)), progress=False),
        lambda model: ns.subspaces(model, token_ids=list(range(1, 13)), progress=False),
        lambda model: ns.words(model, "queries", progress=False),
    ],
)
def test_a_command_with_nothing_to_measure_says_what_is_missing(command: Any) -> None:
    with pytest.raises(InputError, match=r"cannot be measured by .*, which needs (attention|matrices): "):
        command(opened("mamba"))


def test_probes_of_heads_take_layers_with_attention() -> None:
    model = opened("jamba")
    with pytest.raises(InputError, match="layer=0: it has no softmax attention; layers 1, 3 have"):
        ns.words(model, "singular", layer=0, progress=False)
    found = ns.words(model, "singular", layer="all", progress=False)
    assert set(found.tables["spectrum"]["layer"]) == {1, 3}
