"""What a model reads: special tokens as its files state them, token ids instead of text, the clean loss, the first token."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as library
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import normscope as ns
from helpers.gguf_files import write_llama
from helpers.models import COMMON, GROUPED
from normscope.errors import InputError
from normscope.machine.files import read_token_ids
from normscope.measures.base import Subject, measure_all
from normscope.measures.first_token import FirstToken
from normscope.measures.reading import unigram_loss
from normscope.models import NOTHING, Sample, open_model

TEXT = "the man ran and then the man sat on the mat and ran again " * 6


def words_tokenizer(words: str = TEXT, **special: str) -> library.PreTrainedTokenizerFast:
    """A tokenizer of whole words."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **special}
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys([*names.values(), *words.split()]))}
    backend = Tokenizer(models.WordLevel(vocabulary, names["unk_token"]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return library.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def llama() -> library.LlamaForCausalLM:
    torch.manual_seed(0)
    return library.LlamaForCausalLM(library.LlamaConfig(**{**GROUPED, "max_position_embeddings": 512})).eval()


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [({}, [], []), ({"add_bos_token": True}, [0], []), ({"add_bos_token": False, "add_eos_token": True}, [], [1])],
)
def test_a_gguf_file_states_its_special_tokens(
    tmp_path: Path, flags: dict[str, bool], before: list[int], after: list[int]
) -> None:
    model = open_model(write_llama(tmp_path / "tiny.gguf", **flags))
    bare = model.tokenizer("the man", add_special_tokens=False)["input_ids"]
    assert len(bare) == 5  # th e Ġ m an
    assert model.encode("the man") == [*before, *bare, *after]
    assert model.with_bos(True).encode("the man") == [0, *bare, *after]
    assert model.with_bos(False).encode("the man") == [*bare, *after]
    assert model.bos is None


def test_a_sentencepiece_vocabulary_in_a_gguf_file_gets_bos_unless_the_file_states_otherwise(tmp_path: Path) -> None:
    first = [
        open_model(write_llama(tmp_path / f"{i}.gguf", "llama", **flags)).encode("the man")[0]
        for i, flags in enumerate(({}, {"add_bos_token": True}, {"add_bos_token": False}))
    ]
    assert [token == 0 for token in first] == [True, True, False]


@pytest.mark.parametrize("flag", [True, False])
def test_a_tokenizer_configuration_states_bos_where_tokenizer_json_does_not(tmp_path: Path, flag: bool) -> None:
    llama().save_pretrained(tmp_path)
    words_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"add_bos_token": flag}))
    model = open_model(tmp_path)
    assert (model.encode("the man")[0] == model.tokenizer.bos_token_id) == flag


def test_bos_needs_a_tokenizer_with_one() -> None:
    with pytest.raises(InputError, match="no tokenizer"):
        open_model(llama()).with_bos(True)
    tokenizer = words_tokenizer()
    tokenizer.bos_token = None
    with pytest.raises(InputError, match="no BOS token"):
        open_model(llama(), tokenizer=tokenizer).with_bos(True)


def test_an_audit_reports_special_tokens_unknown_tokens_and_the_clean_loss(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(f"{TEXT} zebra zebra zebra zebra zebra zebra")
    model, tokenizer = llama(), words_tokenizer()
    result = ns.stability(
        open_model(model, tokenizer=tokenizer), text=tmp_path / "text.txt", bos=True, measures="spread", progress=False
    )
    ids = [0, *tokenizer(f"{TEXT} zebra zebra zebra zebra zebra zebra")["input_ids"]]
    with torch.no_grad():
        expected = float(model(torch.tensor([ids]), labels=torch.tensor([ids])).loss)
    about = result.configuration
    assert (about["special_before"], about["special_after"]) == ("<s>", "")
    assert about["unknown"] == pytest.approx(6 / len(ids))
    assert about["loss"] == pytest.approx(expected, rel=1e-5)
    shown = next(iter(result.kind.terminal(result)))
    assert f"special tokens: <s> before; unknown tokens: 6.59 %; clean loss: {expected:.2f}" in shown
    titles = {finding.title: finding.severity for finding in result.findings}
    assert titles["The loss is implausible"] == "warning"  # random weights
    assert titles["Many tokens are unknown"] == "warning"


def test_a_plausible_reading_has_no_warning() -> None:
    """A model that copies the frequencies of the sample is at the bound; one that knows more is below it."""
    sample = Sample.continued(torch.randint(0, 5, (4, 64), generator=torch.Generator().manual_seed(0)))
    counts = torch.bincount(sample.tokens.flatten(), minlength=5).double()
    targets = sample.targets[sample.targets != NOTHING]
    entropy = -float((counts / counts.sum()).log()[targets].mean())
    assert unigram_loss(sample) == pytest.approx(entropy)
    result = ns.stability("builtin:addition-small-pre", examples=64, measures="spread", progress=False)
    assert not [finding for finding in result.findings if "implausible" in finding.title]
    assert result.configuration["special_before"] is None


@pytest.mark.parametrize("form", ["12 7, 9\n3", "[12, 7, 9, 3]", "npy"])
def test_token_ids_of_a_file(tmp_path: Path, form: str) -> None:
    path = tmp_path / ("ids.npy" if form == "npy" else "ids.txt")
    np.save(path, np.array([12, 7, 9, 3])) if form == "npy" else path.write_text(form)
    assert read_token_ids(path).tolist() == [[12, 7, 9, 3]]


@pytest.mark.parametrize("content", ["", "1 a 2", "[1.5, 2]", "[[1, 2], [3]]", '["a"]', "[[[1]]]"])
def test_what_is_no_list_of_token_ids_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "ids.txt"
    path.write_text(content)
    with pytest.raises(InputError):
        read_token_ids(path)


def test_models_without_a_tokenizer_read_token_ids(tmp_path: Path) -> None:
    ids = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(0))
    np.save(tmp_path / "ids.npy", ids.numpy())
    model = open_model(llama())
    from_file = ns.stability(model, token_ids=tmp_path / "ids.npy", measures="spread", progress=False)
    given = ns.stability(model, token_ids=ids, measures="spread", progress=False)
    assert from_file.tables["spread"].equals(given.tables["spread"])
    assert [from_file.configuration[name] for name in ("rows", "tokens")] == [2, 80]
    path = ns.words(model, "journey", token_ids=ids[:1, :8], token=-1, progress=False)
    assert path.configuration["word"] == str(int(ids[0, 7]))
    with pytest.raises(InputError, match="exclude each other"):
        ns.stability(model, token_ids=[1, 2, 3], text=Path(__file__), progress=False)
    with pytest.raises(InputError, match="token 50 does not exist"):
        ns.stability(model, token_ids=[1, 2, 50], progress=False)
    with pytest.raises(InputError, match="token_ids="):
        ns.stability(model, progress=False)


def test_a_tokenizer_of_special_tokens_alone_is_none(tmp_path: Path) -> None:
    """The library makes one up for a folder without a vocabulary."""
    library.BertForMaskedLM(library.BertConfig(**COMMON)).save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    assert library.AutoTokenizer.from_pretrained(tmp_path) is not None
    assert open_model(tmp_path).tokenizer is None
    made_up = library.AutoTokenizer.from_pretrained(tmp_path)
    assert open_model(library.BertForMaskedLM(library.BertConfig(**COMMON)), tokenizer=made_up).tokenizer is None


def test_attention_to_the_first_token_is_that_of_plain_attention_weights() -> None:
    model, ids = llama(), torch.randint(0, 50, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for layer in model.model.layers:  # weights that look at something
            layer.self_attn.q_proj.weight *= 20
        model.set_attn_implementation("eager")
        plain = model(ids, output_attentions=True).attentions
    view = open_model(model)
    table = measure_all(Subject(view, view.sample(ids, None, 0)), [FirstToken()])["first_token"]["first_token"]
    for row in table.itertuples():
        assert row.first == pytest.approx(float(plain[row.layer][:, row.head, 1:, 0].mean()), rel=1e-4)
        assert row.uniform == pytest.approx(sum(1 / (i + 1) for i in range(1, 24)) / 23)


@pytest.mark.parametrize(("first", "sink"), [([0.8, 0.5, 0.1, 0.0], True), ([0.2, 0.1, 0.05, 0.29], False)])
def test_the_first_token_is_called_a_sink_where_heads_rest_on_it(first: list[float], sink: bool) -> None:
    table = pd.DataFrame({"layer": 0, "head": range(4), "first": first, "uniform": 0.1})
    (finding,) = FirstToken().findings({"first_token": table}, {})
    assert ("no attention sink" not in finding.text) == sink


def test_an_encoder_keeps_the_special_token_at_the_end_of_a_text_that_is_cut() -> None:
    tokenizer = words_tokenizer(cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", first), ("[SEP]", last)]
    )
    view = open_model(library.BertForMaskedLM(library.BertConfig(**COMMON)).eval(), tokenizer=tokenizer)
    sample = view.sample(TEXT, 10, 0)
    ids = torch.where(sample.targets == NOTHING, sample.tokens, sample.targets)[0].tolist()
    assert ids == [first, *tokenizer(TEXT, add_special_tokens=False)["input_ids"][:8], last]
    assert view.special_ends(sample.tokens[0]) == (["[CLS]"], ["[SEP]"])


def test_opening_a_gguf_file_parses_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    parsed, kept = [], (gguf.GGUFReader, gguf.get_tensor_name_map)
    build = gguf.GGUFReader._build_fields
    monkeypatch.setattr(gguf.GGUFReader, "_build_fields", lambda self, *a: (parsed.append(type(self.data)), build(self, *a))[1])
    model = open_model(write_llama(tmp_path / "tiny.gguf"))
    assert parsed == [np.ndarray]
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == kept
    plain = library.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    assert all(torch.equal(weight, plain.get_parameter(name)) for name, weight in model.model.named_parameters())
    assert open_model(tmp_path / "tiny.gguf", dtype="bfloat16").dtype == torch.bfloat16
