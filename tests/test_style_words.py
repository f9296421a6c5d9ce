"""Texts that users read have the field's words: none that was replaced by a plainer one stands in them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REPLACED = {  # what to write → what it replaces; a word with another sense is meant only where its neighbours say so
    "before layer 3, after layer 3": r"in front of|behind (?:layers?|blocks?|attention|(?:a|the|its|every|each) "
    r"(?:\w+ )?(?:layers?|blocks?|norms?|sublayers?|last|first))",
    "residual stream norm": r"lengths? of (?:an? |the |its |every )?(?:residual )?(?:streams?|tokens?|hidden states?|states?)"
    r"|(?:stream|token|state)s?'s? lengths?|long(?:er|est)? tokens?",
    "rotation per layer, angular step": r"turn(?:s|ed|ing)? by|turns? of tokens",
    "what a sublayer writes, its update": r"(?:its|own|same|these|recorded|their) writes?(?! (?:to|into|a|the|one|its)\b)",
    "hidden state": r"states? that stands?",
    "unsupported architecture": r"not understood|model'?s makes?|makes? of (?:a |the )?models?|of (?:this|another|any) make",
    "became non-finite (NaN/Inf)": r"(?:left|leaves?|leaving) the finite",
    "attention mask, causal mask, padding mask": r"(?:the|its|whose|their|causal) reach|present (?:tokens?|ones|keys)",
    "observer, hook, capture": r"onlook\w+|looked at",
    "swapped out, replaced": r"exchang(?:es?|ed|ing)",
    "reported, measured, computed": r"(?:is|are|was|were|be|been|as|has|have|unless) (?:said|told)|told (?:from|by|that)"
    r"|found (?:that|to be)",
    "sample, batch, dataset, prompt; interpretation": r"(?:an?|the|this|that|each|every|one|two|to|clock's) readings?",
    "settings, config, request": r"asked|\w+'s questions?|(?:newer|older|later|no) questions?|questions? (?:that|is|are)",
    "checkpoint, resume": r"(?:go|goes|went|gone|going) on(?! (?:an?|the)\b)|tak(?:en?|es|ing) up|what (?:it|was|is|were) kept",
    "published value": r"publication'?s?",
}
PATTERNS = {
    instead: re.compile(r"\b(?:" + words.replace(" ", r"\s+") + r")(?!\w)", re.IGNORECASE)
    for instead, words in REPLACED.items()
}
ANY = re.compile("|".join(pattern.pattern for pattern in PATTERNS.values()), re.IGNORECASE)
SCRIPT = re.compile(r"//[^\n]*|/\*.*?\*/|(\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|`(?:[^`\\]|\\.)*`)", re.DOTALL)
CODE = re.compile(r"``[^`]*``|`[^`\n]*`")


def broken_rules(text: str) -> Iterator[tuple[int, str]]:
    """Lines, 0 the first, of replaced words in a text, with what to write instead; identifiers in backticks are no words."""
    if " " not in text.strip() or not ANY.search(text):
        return
    prose = CODE.sub("`…`", text)
    for instead, pattern in PATTERNS.items():
        for match in pattern.finditer(prose):
            around = " ".join(prose[max(0, match.start() - 40) : match.end() + 40].split())
            yield prose.count("\n", 0, match.start()), f"'{match[0]}' → {instead}: …{around}…"


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The texts of a file that may reach a user, with their lines: strings of a program, all of a page.

    None of a file without any of the words.
    """
    content = path.read_text(encoding="utf-8")
    if not ANY.search(content):
        return
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.lineno, node.value
    elif path.suffix == ".js":
        for match in SCRIPT.finditer(content):
            if match[1]:
                yield content.count("\n", 0, match.start()) + 1, match[1]
    else:
        yield 1, content


def files() -> list[Path]:
    """Programs, pages and documents."""
    source = [path for suffix in ("py", "js", "j2", "toml") for path in (ROOT / "src").rglob(f"*.{suffix}")]
    others = [path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    return sorted([*source, *others, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def test_no_replaced_word_reaches_a_user() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{first + line}: {rule}"
        for path in files()
        for first, text in texts(path)
        for line, rule in broken_rules(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "the norm in front of layer 3", "states behind the last layer", "the length of the stream", "a longer token",
        "tokens are turned by 20°", "with its writes", "the state that stands", "this model's make is not understood",
        "a run left the finite numbers", "the reach of a query", "the present tokens", "an onlooker", "looked at by hooks",
        "heads were exchanged", "as was said above", "told from its sums", "two readings of a text", "an audit's question",
        "what was asked for", "interrupted, it goes on", "it is taken up again", "the publication's value",
        "the norm in\nfront of it",
    ],
)  # fmt: skip
def test_replaced_words_are_noticed(text: str) -> None:
    assert list(broken_rules(text))


@pytest.mark.parametrize(
    "text",
    [
        "the numbers behind a figure", "nothing is left behind", "the length of a step", "a longer warm-up",
        "what a sublayer writes to the stream", "a command writes a folder", "the whole mask is a question mark",
        "one script for each question",
        "the time of a chunk goes on the products", "reading the corpus", "the table `reading`", "values are present",
    ],
)  # fmt: skip
def test_other_senses_are_allowed(text: str) -> None:
    assert not list(broken_rules(text))


def test_strings_of_scripts_are_texts_and_comments_are_not(tmp_path: Path) -> None:
    script = tmp_path / "page.js"
    line = '/* asked */ const url = "http://a b"; show(`so many ${n} were asked`);'
    script.write_text(f"// what is asked\n{line}\n", encoding="utf-8")
    assert list(texts(script)) == [(2, '"http://a b"'), (2, "`so many ${n} were asked`")]
