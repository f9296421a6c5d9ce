"""examples/corpus: what a package's files become, without a network."""

import gzip
import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest

PROSE = "Residual streams carry what every layer adds, and a norm decides how far one layer turns them. " * 3
PAGE = f"""<html><head><title>dropped</title><style>p {{}}</style></head><body><div id="toc"><div>dropped</div>dropped</div>
<h1>Title</h1><p>{PROSE}<br>a  <b>bold</b>
word &amp; more<pre>int  a;
  int b;</pre><table><tr><td>one</td><td> two</td></tr></table><div class="t-navbar main">dropped</div></body></html>"""


@pytest.fixture(scope="module")
def build() -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / "corpus" / "build.py"
    spec = importlib.util.spec_from_file_location("build_corpus", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """An unpacked package: pages in two forms, duplicates, stubs, translations, generated lists and a dictionary."""
    doc = tmp_path / "tree" / "usr" / "share" / "doc" / "tiny-doc"
    for folder in ("html/_sources", "Documentation/translations/it"):
        (doc / folder).mkdir(parents=True)
    (doc / "copyright").write_text("License: MIT\n")
    (doc / "html" / "both.html").write_text("<p>short form</p>")
    (doc / "html" / "_sources" / "both.rst.txt").write_text(f"Both\n====\n{PROSE}")
    (doc / "Documentation" / "both.rst.gz").write_bytes(gzip.compress(f"Both\n====\n{PROSE}".encode()))
    (doc / "Documentation" / "copy.rst").write_text(f"Both\n====\n{PROSE}\n\n\n")
    (doc / "Documentation" / "stub.rst").write_text("See elsewhere.")
    (doc / "Documentation" / "windows.txt").write_bytes(PROSE.encode() + b"it\x92s")
    (doc / "Documentation" / "translations" / "it" / "page.rst").write_text(PROSE + "tradotto")
    (doc / "html" / "genindex-all.html").write_text(f"<p>{PROSE} links</p>")
    (doc / "html" / "page.html").write_text(PAGE)
    (doc / "changelog.Debian.gz").write_bytes(gzip.compress(PROSE.encode()))
    return tmp_path / "tree"


def test_html_becomes_lines_of_text_without_navigation(build: ModuleType) -> None:
    text = build.tidy(build.html_text(PAGE))
    assert "dropped" not in text
    assert text == f"Title\n\n{PROSE.strip()}\na bold word & more\nint  a;\n  int b;\n\none two\n"


def test_pages_are_sorted_and_neither_repeated_nor_empty(build: ModuleType, tree: Path) -> None:
    documents = dict(build.selected(build.pages(tree), set()))
    assert [name.rpartition("/")[2] for name in documents] == ["both", "page", "windows"]
    assert documents["usr/share/doc/tiny-doc/both"].startswith("Both\n====\nResidual")
    assert documents["usr/share/doc/tiny-doc/windows"].endswith("it’s\n")


def test_entries_of_a_dictionary_form_pages_in_order(build: ModuleType, tmp_path: Path) -> None:
    entries = [f"word{i} \\word\\ n.\n   Meaning {i}.\n" for i in range(1000)]
    info, digits = "about the dictionary\n", "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"

    def in_base_64(value: int) -> str:
        return (in_base_64(value // 64) if value >= 64 else "") + digits[value % 64]

    lines, start = [f"00-database-info\tA\t{in_base_64(len(info))}"], len(info)
    for i, entry in enumerate(entries):
        lines += [f"{name}\t{in_base_64(start)}\t{in_base_64(len(entry))}" for name in (f"word{i}", f"synonym{i}")]
        start += len(entry)
    (tmp_path / "tiny.dict.dz").write_bytes(gzip.compress((info + "".join(entries)).encode()))
    (tmp_path / "tiny.index").write_text("\n".join(sorted(lines)))
    texts = [text for _, text in build.pages(tmp_path)]
    assert "\n".join(texts) == "\n".join(entries)
    assert [len(text) >= build.DICTIONARY_PAGE for text in texts] == [True] * (len(texts) - 1) + [False]


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="packages are unpacked with dpkg-deb")
def test_a_corpus_is_built_once_and_resumed(
    build: ModuleType, tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("other-doc", "tiny-doc"):
        (tree / "DEBIAN").mkdir(exist_ok=True)
        control = f"Package: {package}\nVersion: 1.0\nArchitecture: all\nMaintainer: n <n@n.org>\nDescription: n\n"
        (tree / "DEBIAN" / "control").write_text(control)
        (tmp_path / "to" / "packages").mkdir(parents=True, exist_ok=True)
        deb = str(tmp_path / "to" / "packages" / f"{package}_1.0_all.deb")
        subprocess.run(["dpkg-deb", "--build", str(tree), deb], check=True, capture_output=True)
        (tree / "usr" / "share" / "doc" / "tiny-doc" / "Documentation" / "more.txt").write_text(PROSE + "more")
    options = ["--to", str(tmp_path / "to"), "--packages", "tiny-doc", "other-doc"]
    build.main(options)
    assert "together: 4 documents" in capsys.readouterr().out
    file = tmp_path / "to" / "text" / "tiny-doc.parquet"
    assert pq.read_table(file)["text"].to_pylist() == [PROSE + "more\n"]  # the rest is in other-doc, which comes first
    assert (tmp_path / "to" / "licences" / "tiny-doc.txt").read_text() == "License: MIT\n"
    before = file.read_bytes(), file.stat().st_mtime_ns
    build.main(options)
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before
    file.unlink()
    build.main(options)
    assert file.read_bytes() == before[0]
    summary = json.loads((tmp_path / "to" / "summary.json").read_text())
    assert summary["documents"] == 4
    assert summary["bytes"] == sum(len(t.encode()) for f in file.parent.iterdir() for t in pq.read_table(f)["text"].to_pylist())


def test_what_is_missing_is_one_line(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        SystemExit, match=r"^apt-get is not installed: run .*put no-such-doc_VERSION_all\.deb .* into .*packages$"
    ):
        build.main(["--to", str(tmp_path / "to"), "--packages", "no-such-doc"])
    (tmp_path / "apt-get").write_text("#!/bin/sh\necho 'E: Unable to locate package no-such-doc' >&2\nexit 100\n")
    (tmp_path / "apt-get").chmod(0o755)
    with pytest.raises(SystemExit, match=r"^E: Unable to locate package no-such-doc: run `apt-get update`, or choose"):
        build.main(["--to", str(tmp_path / "to"), "--packages", "no-such-doc"])
    assert not list((tmp_path / "to" / "packages").iterdir())
