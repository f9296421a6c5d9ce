"""The model atlas: numbers against plain transformers, against an audit's own tables, and the view in a browser."""

import csv
import io
import json
import math
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import pytest
import torch
import transformers as library
import uvicorn

import normscope as ns
from helpers.browser import Tab, assert_readable
from helpers.gpt2 import save_gpt2
from helpers.models import FAMILIES, built, opened_smollm2
from helpers.tiny_models import tiny_model
from normscope.errors import InputError
from normscope.explorer.audits import audit_data
from normscope.explorer.export import export_explorer
from normscope.explorer.server import Settings, make_app
from normscope.explorer.session import ModelSession
from normscope.measures.noise import Disturbance, norm_noise
from normscope.measures.probes import key_table, nearest_keys, reader
from normscope.models import Model, Sample, open_model

PROMPT = "the time of the world of the year"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_gpt2(tmp_path_factory.mktemp("atlas") / "gpt2")


@pytest.fixture(scope="module")
def plain(folder: str) -> Any:
    return library.GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def session(folder: str) -> ModelSession:
    return ModelSession(open_model(folder))


def grids(data: dict[str, Any]) -> dict[str, Any]:
    return {grid["name"]: torch.tensor([[math.nan if x is None else x for x in row] for row in grid["values"]])
            for grid in data["heads"]}  # fmt: skip


def curve(data: dict[str, Any], name: str, kind: str = "measured") -> list[float]:
    (found,) = (each for each in data["curves"] if each["name"] == name)
    (line,) = (line for line in found["lines"] if line["kind"] == kind)
    return [math.nan if y is None else y for y in line["y"]]


def ids_of(session: ModelSession, prompt: str) -> torch.Tensor:
    return torch.tensor([session.model.encode(prompt)])


def test_a_prompt_shows_what_transformers_computes(session: ModelSession, plain: Any) -> None:
    with torch.no_grad():
        found = plain(ids_of(session, PROMPT), output_attentions=True, output_hidden_states=True)
    data = session.read(PROMPT)
    json.dumps(data, allow_nan=False)
    weights = torch.stack([layer[0] for layer in found.attentions])  # layers, heads, queries, keys
    largest = weights[:, :, 1:].amax(-1)
    heads = grids(data)
    torch.testing.assert_close(heads["top-weight"], largest.mean(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(heads["sparsity"], (largest >= 0.95).float().mean(-1))
    entropy = torch.special.entr(weights).sum(-1)[:, :, 1:].mean(-1)
    torch.testing.assert_close(heads["entropy"], entropy, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(heads["first-token"], weights[:, :, 1:, 0].mean(-1), rtol=1e-5, atol=1e-6)
    shown = session.head(PROMPT, 1, 1)
    torch.testing.assert_close(torch.tensor(shown["pattern"]), weights[1, 1], rtol=0, atol=6e-5)
    assert [query["key"] for query in shown["queries"]] == weights[1, 1].argmax(-1).tolist()
    states = found.hidden_states[:-1]  # the last has passed the final norm
    lengths = states[1][0].norm(dim=-1)
    assert shown["norms"] == pytest.approx((lengths / lengths.median()).tolist(), rel=1e-4)


def test_a_token_is_followed_as_hooks_see_it(session: ModelSession, plain: Any) -> None:
    kept: list[torch.Tensor] = []
    hooks = [block.register_forward_pre_hook(lambda module, args: kept.append(args[0][0, 3])) for block in plain.transformer.h]
    hooks.append(plain.transformer.ln_f.register_forward_pre_hook(lambda module, args: kept.append(args[0][0, 3])))
    with torch.no_grad():
        logits = plain(ids_of(session, PROMPT)).logits[0, 3]
    for hook in hooks:
        hook.remove()
    shown = session.token(PROMPT, 3)
    json.dumps(shown, allow_nan=False)
    x = torch.stack(kept)
    assert [row["radius"] for row in shown["rows"]] == pytest.approx(x.norm(dim=-1).tolist(), rel=1e-4)
    centred = torch.nn.functional.normalize(x - x.mean(-1, keepdim=True), dim=-1)  # what LayerNorm sees
    angles = torch.rad2deg(torch.arccos((centred[1:] * centred[:-1]).sum(-1).clamp(-1, 1)))
    assert [row["angle"] for row in shown["rows"][1:]] == pytest.approx(angles.tolist(), abs=0.05)
    lens = plain.lm_head(plain.transformer.ln_f(x)).softmax(-1)
    assert [row["predicted_token"] for row in shown["rows"]] == lens.argmax(-1).tolist()
    assert [row["predicted_probability"] for row in shown["rows"]] == pytest.approx(lens.amax(-1).tolist(), rel=1e-3)
    best = logits.softmax(-1).topk(10)
    assert [row["token"] for row in shown["next"]] == best.indices.tolist()
    assert [row["probability"] for row in shown["next"]] == pytest.approx(best.values.tolist(), rel=1e-4)
    assert shown["scene"]["trails"][0]["steps"] == [0, 1, 2, 3]


def test_the_session_and_an_audit_agree(session: ModelSession, folder: str, tmp_path: Path) -> None:
    """The same text: the same grids and curves from one pass as from the tables of a saved audit, heads' matrices included."""
    text = tmp_path / "text.txt"
    text.write_text(PROMPT, encoding="utf-8")
    audit = ns.audit(folder, text=text, sentence=PROMPT, fresh=True, progress=False)
    then = audit_data(audit.tables, audit.configuration)
    json.dumps(then, allow_nan=False)
    now = session.later(PROMPT)
    assert {"interference", "spheres-queries", "overlap-queries", "effective-rank"} <= set(grids(now))
    assert set(grids(now)) - set(grids(then)) == {"entropy"}  # an audit has no table of it
    for name, values in grids(then).items():
        torch.testing.assert_close(grids(now)[name], values, rtol=1e-4, atol=1e-5, equal_nan=True)
    for name in ("angle", "speed", "radius", "cosine", "rank"):
        assert curve(now, name) == pytest.approx(curve(then, name), rel=1e-5, nan_ok=True)
    assert curve(now, "speed", "theory") == pytest.approx(curve(then, "speed", "theory"), rel=1e-5)
    followed = session.token(PROMPT, -2)
    for mine, theirs in zip(followed["rows"], then["token"]["rows"], strict=True):
        assert mine["nearest_text"] == theirs["nearest_text"]
        assert mine["radius"] == pytest.approx(theirs["radius"], rel=1e-5)
    for kept in then["maps"]:
        pattern = session.head(PROMPT, kept["layer"], kept["head"])["pattern"]
        assert torch.tensor(kept["pattern"]).numpy() == pytest.approx(torch.tensor(pattern).numpy(), abs=6e-5)


def test_noise_changes_what_it_is_put_on(session: ModelSession) -> None:
    still = session.noise(PROMPT, {"level": 0.0}, -1)
    assert still["lost"] == 0
    assert still["next"]["distance"] == pytest.approx(0, abs=1e-6)
    loud = session.noise(PROMPT, {"level": 0.5, "parts": "qkm", "draw": 1}, -1)
    again = session.noise(PROMPT, {"level": 0.5, "parts": "qkm", "draw": 1}, -1)
    other = session.noise(PROMPT, {"level": 0.5, "parts": "qkm", "draw": 2}, -1)
    assert loud == again != other
    assert loud["next"]["distance"] > 1e-4
    before = {row["token"]: row["before"] for row in loud["next"]["rows"]}
    plain = {row["token"]: row["probability"] for row in session.token(PROMPT, -1)["next"]}
    assert all(before[token] == pytest.approx(value, rel=1e-5) for token, value in plain.items() if token in before)
    alone = session.noise(PROMPT, {"level": 0.5, "parts": "k", "layer": 2}, -1)
    assert max(value for row in alone["moved"][:2] for value in row) == 0  # layers before the noise
    shown = session.head(PROMPT, 0, 0, {"level": 0.5, "parts": "qk", "draw": 3})
    assert shown["noisy"] != shown["pattern"]
    assert torch.tensor(shown["noisy"]).sum(-1).numpy() == pytest.approx(1, abs=1e-2)


def test_noise_on_input_norms_is_shared_by_all_heads(session: ModelSession, plain: Any) -> None:
    """Against plain transformers whose first layer norm multiplies every token by the same factors."""
    model, sample = session.model, session.sample(PROMPT)[0]
    noise = Disturbance(0.5, "x", layer=1)
    generator = torch.Generator().manual_seed(7)
    logits = model.forward(sample, norm_noise(noise, "", generator, model))
    most = math.sqrt(3) * 0.5
    factors = 1 + torch.empty(sample.tokens.shape).uniform_(-most, most, generator=torch.Generator().manual_seed(7))
    hook = plain.transformer.h[1].ln_1.register_forward_hook(lambda module, args, output: output * factors[..., None])
    with torch.no_grad():
        wanted = plain(sample.tokens).logits
    hook.remove()
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)


def test_heads_are_described_in_words(session: ModelSession, folder: str) -> None:
    """The tokens with the largest q·k are those that the words experiment reports, and common nouns are there too."""
    token = session.reading(PROMPT).tokens[1].strip()
    shown = session.words(PROMPT, 1, 1, 1)["rows"]
    wanted = ns.words(folder, "queries", layer=1, head=1, word=token, nearest=6, progress=False).tables["nearest"]
    assert shown[0]["keys"] == list(wanted["nearest_text"])
    promoted = ns.words(folder, "values", layer=1, head=1, word=token, nearest=6, progress=False).tables["nearest"]
    assert shown[0]["values"] == list(promoted[promoted["head"].notna()]["nearest_text"])
    assert len(shown) > 3


@pytest.mark.parametrize(("prompt", "count"), [("", 1), ("the", 1), ("the time", 2)])
def test_short_prompts_work(session: ModelSession, prompt: str, count: int) -> None:
    data = session.read(prompt)
    assert len(data["prompt"]["tokens"]) == count
    assert bool(data["heads"]) == (count > 1)
    assert ("two tokens" in data["missing"].get("heads", "")) == (count == 1)
    assert session.head(prompt, 0, 0)["pattern"][0] == pytest.approx([1.0, *[0.0] * (count - 1)])
    assert len(session.token(prompt, -1)["rows"]) == 4
    assert session.noise(prompt, {"level": 0.3}, -1)["next"]["rows"]
    assert session.words(prompt, 0, 0, 0)["rows"]


def test_long_prompts_and_wrong_places_are_refused_in_plain_words(session: ModelSession) -> None:
    with pytest.raises(InputError, match="the prompt has 33 tokens, and at most 32 are read"):
        session.read("the" + " of" * 32)
    with pytest.raises(InputError, match="layers 0 to 2"):
        session.head(PROMPT, 3, 0)
    with pytest.raises(InputError, match="heads 0 to 1"):
        session.head(PROMPT, 0, 2)
    with pytest.raises(InputError, match="tokens 0 to 7"):
        session.token(PROMPT, 8)
    with pytest.raises(InputError, match="heads 0 to 1"):
        session.words(PROMPT, 0, 2, -1)
    with pytest.raises(InputError, match=r"from 0 to 0\.5"):
        session.noise(PROMPT, {"level": 0.58}, -1)


def test_a_run_ends_between_layers(session: ModelSession) -> None:
    class StopError(Exception):
        pass

    seen = []

    def check() -> None:
        seen.append(1)
        if len(seen) == 2:
            raise StopError

    with pytest.raises(StopError):
        session.read("the world of the time", check)
    assert len(session.read("the world of the time")["prompt"]["tokens"]) == 5  # nothing half is kept


class Mixer(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(x.cumsum(1)))


class Reader(torch.nn.Module):
    """Residual blocks without attention, whose table of tokens is narrower than its stream."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.widen = torch.nn.Embedding(40, 8), torch.nn.Linear(8, 16)
        self.blocks = torch.nn.ModuleList(Mixer(16) for _ in range(3))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.widen(self.table(input_ids))
        for block in self.blocks:
            x = block(x)
        return x


@cache
def stream_only() -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return open_model(Reader().eval())


def test_a_model_that_offers_only_its_stream_is_shown_as_far_as_it_goes() -> None:
    session = ModelSession(stream_only())
    data = session.read("5 12 7 9")
    assert data["heads"] == []
    assert {"angle", "radius", "cosine"} <= {each["name"] for each in data["curves"]}
    assert {"heads", "map", "words", "nearest", "lens", "noise"} <= set(data["missing"])
    assert all(text.endswith(".") for text in data["missing"].values())
    assert "no attention map" in session.head("5 12 7 9", 0, 0)["missing"]
    assert session.words("5 12 7 9", 0, 0, 0)["missing"]
    shown = session.token("5 12 7 9", 2)
    states: list[torch.Tensor] = []
    hook = stream_only().model.blocks[1].register_forward_pre_hook(lambda module, args: states.append(args[0]))
    with torch.no_grad():
        stream_only().model(torch.tensor([[5, 12, 7, 9]]))
    hook.remove()
    assert shown["rows"][1]["radius"] == pytest.approx(float(states[0][0, 2].norm()), rel=1e-4)
    assert shown["scene"] is not None
    assert "nearest_text" not in shown["rows"][0]
    with pytest.raises(InputError, match="token ids"):
        session.read("hello")
    with pytest.raises(InputError, match="no softmax attention"):
        session.noise("5 12", {"level": 0.1}, -1)


@pytest.mark.parametrize("family", ["bert", "gemma2", "gpt-neox", "qwen3"])
def test_other_families_answer_every_question(family: str) -> None:
    made = FAMILIES[family]
    session = ModelSession(open_model(built(made.config, made.options, made.maker)))
    data = session.read("5 12 7 9 11")
    assert data["heads"]
    json.dumps([data, session.head("5 12 7 9 11", 1, 1), session.token("5 12 7 9 11", 1)], allow_nan=False)
    noisy = session.noise("5 12 7 9 11", {"level": 0.5, "parts": "k"}, 0)
    if "k" in session.model.normalised_heads:
        assert noisy["lost"] == 0
        assert max(x for row in noisy["moved"] for x in row if x is not None) == 0
    assert session.words("5 12 7 9 11", 0, 0, 0)["rows"]


@pytest.mark.parametrize("family", ["bert", "gemma2", "gpt-neox", "qwen3"])
def test_a_table_of_keys_gives_the_scores_of_the_model(family: str) -> None:
    """For one head as for all of them, with biases and where keys are normalised: then no product has them."""
    made = FAMILIES[family]
    model, tokens = open_model(built(made.config, made.options, made.maker)), torch.tensor([5, 12])
    table, wanted = key_table(model, 1), nearest_keys(model, 1, tokens, 4)
    (q,) = model.heads_of(1, reader(model, 1)(model.embeddings[tokens])[1][None], None, "q")
    for head in range(model.heads):
        found = table.scores(head, q[0, head]).topk(4).values
        torch.testing.assert_close(found, wanted.scores[head], rtol=1e-4, atol=1e-5)
    assert (table.inputs is None) == ("k" in model.normalised_heads)


def test_models_of_tasks_read_an_example() -> None:
    session = ModelSession(open_model("builtin:addition-small-pre"))
    data = session.read("anything")
    assert not data["about"]["reads_text"]
    assert "examples of its task" in data["prompt"]["note"]
    assert len(grids(data)["top-weight"]) == 4


def test_a_prompt_on_smollm2() -> None:
    """The real model: what it predicts, and a circuit that noise breaks, beside what theory expects of it."""
    session = ModelSession(opened_smollm2())
    prompt = "The capital of France is Paris and the capital of Italy is"
    data = session.read(prompt)
    assert len(grids(data)["margin"]) == 30
    shown = session.token(prompt, -1)
    assert shown["next"][0]["text"] == " Rome"
    assert shown["rows"][-1]["predicted_text"] == " Rome"
    sample = Sample.of(session.model.batch(session.model.encode(prompt)).tokens)
    with session.model.capture("pattern") as captured:
        session.model.forward(sample)
    pattern = captured["pattern", 5][0, 2]
    assert torch.tensor(session.head(prompt, 5, 2)["pattern"]).numpy() == pytest.approx(pattern.numpy(), abs=6e-5)
    noisy = session.noise(prompt, {"level": 0.3, "parts": "k"}, -1)
    assert 0 < noisy["lost"] < noisy["rows"]
    assert noisy["next"]["distance"] > 0.05


TOKEN = "a-token-of-the-tests"
SETTLED = "#view-atlas[data-settled=true]"
LONGEST = 120_000  # milliseconds on a loaded machine


@pytest.fixture(scope="module")
def audit_folder(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("audits")
    text = place / "text.txt"
    text.write_text(PROMPT, encoding="utf-8")
    ns.audit(folder, text=text, sentence=PROMPT, out=place / "audited", fresh=True, progress=False)
    return place / "audited"


@pytest.fixture(scope="module")
def server(folder: str, audit_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real server with a model, one without attention and without a tokenizer, and an audit."""
    mamba = tmp_path_factory.mktemp("atlas") / "mamba"
    tiny_model("mamba", "causal").save_pretrained(mamba)
    app = make_app(Settings((folder, str(mamba), str(audit_folder)), token=TOKEN))
    running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.02)
    port = running.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}/?token={TOKEN}"
    running.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def tab(tab: Tab) -> Tab:
    tab.page.set_default_timeout(LONGEST)
    return tab


def view(tab: Tab, address: str, **state: Any) -> None:
    """Open the atlas in a state, and wait until everything is there."""
    tab.errors.clear()
    tab.page.goto("about:blank")
    tab.page.set_viewport_size({"width": 1200, "height": 900})
    tab.page.goto(f"{address}#atlas?{urlencode({'prompt': PROMPT, **state})}")
    tab.page.wait_for_selector(SETTLED)


def settle(tab: Tab) -> None:
    tab.page.wait_for_selector(SETTLED)


def hash_of(tab: Tab) -> dict[str, str]:
    return dict(parse_qsl(tab.page.url.partition("?")[2].partition("?")[2]))


def complaints(tab: Tab) -> list[str]:
    """What went wrong in the page; requests that it gave up for newer ones, or by leaving, are none."""
    return [text for text in tab.errors if "ERR_ABORTED" not in text]


def part(tab: Tab, name: str) -> Any:
    return tab.page.locator(f"[data-part={name}]")


def saved(tab: Tab, label: str) -> bytes:
    """The file that a button of the save dialog gives."""
    tab.page.get_by_role("button", name="Save").click()
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name=label, exact=True).click()
    content = Path(download.value.path()).read_bytes()
    tab.page.keyboard.press("Escape")
    return content


def test_the_view_shows_heads_and_follows_what_is_chosen(tab: Tab, server: str, session: ModelSession) -> None:
    view(tab, server)
    page = tab.page
    table = csv_rows(saved(tab, "Layers × heads (CSV)"))
    wanted = grids(session.read(PROMPT))["top-weight"]
    assert [float(row["mean largest weight"]) for row in table] == pytest.approx(wanted.flatten().tolist(), rel=1e-5)
    canvas = part(tab, "map").locator("canvas").first
    canvas.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert "layer 1, head 1" in part(tab, "map").locator("[aria-live]").inner_text()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Layer 1, head 1").wait_for()
    settle(tab)
    tab.wait("document.getElementById('announcement').textContent.startsWith('Layer 1, head 1')")
    left, right = (page.get_by_role("region", name=name).bounding_box() for name in ("Layers × heads", "The chosen head"))
    assert right["y"] == left["y"] < 900  # beside the map, on the screen
    assert right["x"] > left["x"] + left["width"]
    assert (hash_of(tab)["layer"], hash_of(tab)["head"]) == ("1", "1")
    pattern = torch.tensor([float(row["weight"]) for row in csv_rows(saved(tab, "Attention map (CSV)"))]).view(8, 8)
    assert pattern.numpy() == pytest.approx(torch.tensor(session.head(PROMPT, 1, 1)["pattern"]).numpy())
    page.get_by_role("button", name="token 2: ␣of").click()
    page.get_by_role("heading", name="Journey of ␣of").wait_for()
    settle(tab)
    rows = csv_rows(saved(tab, "Journey (CSV)"))
    assert [float(row["radius"]) for row in rows] == pytest.approx([x["radius"] for x in session.token(PROMPT, 2)["rows"]])
    page.locator("select[name=measure]").select_option("entropy")
    settle(tab)
    page.go_back()
    settle(tab)
    assert page.locator("select[name=measure]").input_value() == "top-weight"
    assert page.get_by_role("button", name="token 2: ␣of").get_attribute("aria-pressed") == "true"
    words = part(tab, "head").get_by_role("table").filter(has_text="attends to")
    assert session.words(PROMPT, 1, 1, 2)["rows"][0]["keys"][0].strip() in words.inner_text()
    for name, begins in (("Layers × heads (PNG)", b"\x89PNG"), ("Layers × heads (SVG)", b"<svg"), ("Journey (PNG)", b"\x89PNG"),
                         ("Journey (SVG)", b"<svg"), ("Curve by layer (SVG)", b"<svg")):  # fmt: skip
        assert saved(tab, name).startswith(begins)
    assert complaints(tab) == []


def test_a_prompt_is_typed_and_a_dial_is_turned(tab: Tab, server: str, session: ModelSession) -> None:
    view(tab, server)
    page, prompt = tab.page, tab.page.get_by_label("Prompt", exact=True)
    prompt.fill("the world of the time")
    prompt.press("Enter")
    page.get_by_role("button", name="token 4: ␣time").wait_for()
    settle(tab)
    assert hash_of(tab)["prompt"] == "the world of the time"
    dial = page.get_by_label("RMS of the relative noise")
    dial.focus()
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    page.get_by_text("Next token before (outlined) and after noise").wait_for()
    settle(tab)
    shown = session.noise("the world of the time", {"level": 0.5, "parts": "qkm"}, -1)
    assert page.get_by_text("no circuit can collapse").is_visible()
    rows = csv_rows(saved(tab, "Next tokens (CSV)"))
    assert [float(row["after"]) for row in rows] == pytest.approx([row["after"] for row in shown["next"]["rows"]])
    page.get_by_label("On the norms of").select_option("x")
    settle(tab)
    page.get_by_role("button", name="Another draw").click()
    settle(tab)
    tab.wait("location.hash.includes('draw=1')")  # the address follows a moment later
    assert {name: hash_of(tab)[name] for name in ("noise", "parts", "draw")} == {"noise": "0.5", "parts": "x", "draw": "1"}
    prompt.fill("the" + " of" * 40)
    page.get_by_text("the prompt has 41 tokens, and at most 32 are read").wait_for()
    settle(tab)
    assert page.get_by_text("What is shown is still of the prompt “the world of the time”").is_visible()
    assert sum("422" in text for text in complaints(tab)) == 1  # nothing more is asked about what cannot be read
    prompt.fill("")
    page.get_by_text("The prompt is empty").wait_for()
    settle(tab)
    assert page.get_by_text("two tokens or more").first.is_visible()
    assert [
        text for text in complaints(tab) if "422" not in text
    ] == []  # the browser reports the answer that refuses the prompt


def test_a_link_out_of_range_shows_what_is_nearest(tab: Tab, server: str) -> None:
    view(tab, server, layer=-5, head=99, token=1.5, noise=7, parts="zz", at=77, draw=-1)
    assert tab.page.get_by_role("heading", name="Layer 0, head 1").is_visible()
    assert tab.page.get_by_text("Next token before (outlined) and after noise").is_visible()
    assert tab.page.locator(".problem:visible").count() == 0
    assert complaints(tab) == []


def test_what_no_server_answers_is_asked_again(tab: Tab, server: str) -> None:
    view(tab, server)
    tab.page.context.set_offline(True)
    tab.page.get_by_label("Prompt", exact=True).fill("the world of the time")
    tab.page.locator("#connection:visible").wait_for()
    settle(tab)
    assert tab.page.get_by_text(f"What is shown is still of the prompt “{PROMPT}”").is_visible()
    assert tab.page.locator(".problem:visible").count() == 0  # the frame alone reports it
    tab.page.context.set_offline(False)
    tab.page.get_by_role("button", name="token 4: ␣time").wait_for()
    settle(tab)
    assert not tab.page.locator("#connection").is_visible()
    assert not tab.page.get_by_text("What is shown is still").is_visible()


def test_two_sides_and_theory(tab: Tab, server: str) -> None:
    view(tab, server, curve="speed")
    page, beside = tab.page, tab.page.get_by_label("Compare with")
    audit = next(value for value in options(beside) if value.startswith("run:"))
    beside.select_option("theory")
    settle(tab)
    assert {row["line"] for row in csv_rows(saved(tab, "Curve by layer (CSV)"))} == {"measured", "theory"}
    beside.select_option(audit)
    page.get_by_text("An audit follows one token of its sentence").wait_for()
    settle(tab)
    assert part(tab, "map").locator("canvas").count() == 2
    assert part(tab, "token").locator("canvas").count() == 4  # two spheres of two layers
    lines = csv_rows(saved(tab, "Curve by layer (CSV)"))
    sides = {name: [row["s"] for row in lines if row["line"] == name] for name in {row["line"] for row in lines}}
    (mine, theirs) = sides.values()  # the same model and text: the same numbers
    assert [float(x) for x in mine] == pytest.approx([float(x) for x in theirs], rel=1e-4)
    tab.page.set_viewport_size({"width": 375, "height": 800})
    for colours in ("dark", "light"):
        tab.page.emulate_media(color_scheme=colours)
        tab.settle()
        assert tab.run("document.documentElement.scrollWidth") <= 375
        assert_readable(tab)
    assert complaints(tab) == []


def test_parts_that_a_model_cannot_show_say_so(tab: Tab, server: str) -> None:
    view(tab, server, a="model:1", prompt="words")
    page = tab.page
    assert page.get_by_text("this model has no tokenizer: type token ids").is_visible()
    page.get_by_label("Prompt", exact=True).fill("5 12 7 9")
    page.get_by_label("Prompt", exact=True).press("Enter")
    page.get_by_role("heading", name="Journey of 9").wait_for()
    settle(tab)
    for text in ("No heads to show:", "No attention maps:", "No words of heads:", "No noise on norms of attention:"):
        assert page.get_by_text(text).first.is_visible()
    assert page.get_by_label("RMS of the relative noise").is_disabled()
    assert part(tab, "token").locator("canvas").count() == 2
    assert {row["line"] for row in csv_rows(saved(tab, "Curve by layer (CSV)"))} == {"measured", "the chosen token"}
    assert [text for text in complaints(tab) if "422" not in text] == []


def test_an_exported_audit_works_from_disk(tab: Tab, audit_folder: Path, tmp_path: Path) -> None:
    page = export_explorer(tmp_path / "atlas.html", [str(audit_folder)])
    tab.open(page)
    tab.page.wait_for_selector(SETTLED)
    assert part(tab, "map").locator("canvas").count() == 1
    assert part(tab, "token").locator("canvas").count() == 2
    assert not tab.page.get_by_label("Prompt", exact=True).is_visible()
    canvas = part(tab, "map").locator("canvas").first
    canvas.focus()
    tab.page.keyboard.press("Enter")
    settle(tab)
    assert tab.page.get_by_text("An audit does not probe heads with words").is_visible()
    assert complaints(tab) == []
    assert all(url.startswith(("file:", "blob:", "data:")) for url in tab.loaded)


def test_without_a_model_or_an_audit_the_view_says_what_to_open(tab: Tab, tmp_path: Path) -> None:
    tab.open(export_explorer(tmp_path / "empty.html"))
    tab.page.get_by_role("tab", name="Model atlas").click()
    assert tab.page.get_by_text("There is no model and no audit to show").is_visible()


def csv_rows(content: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(content.decode("utf-8"))))


def options(select: Any) -> list[str]:
    return [option.get_attribute("value") for option in select.locator("option").all()]
