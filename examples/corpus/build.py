"""Build a text corpus for language models from documentation packages of Debian.

python examples/corpus/build.py --to corpus; README.md beside this file describes the result and lists the licences.
Packages are downloaded with apt and unpacked into a temporary folder; nothing is installed.
"""

import argparse
import gzip
import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rich.progress import track

PACKAGES = ("anarchism", "cppreference-doc-en-html", "dict-gcide", "linux-doc-6.1", "python3.11-doc")
RULES = 1  # of extraction; another number extracts every package again
SHORTEST = 200  # bytes; a shorter page is navigation or a stub
DICTIONARY_PAGE = 8192  # bytes; entries of a dictionary are short, so consecutive ones form a page

PAGES = (".rst", ".txt", ".md", ".html")
FORMS = {"Documentation", "_sources", "html", "markdown"}  # folders that hold one page in several forms
GENERATED = re.compile(r"(genindex(-.*)?|contents|(.*-)?modindex|symbol_index)(\.[a-z]+)+")  # lists of links
TRANSLATED = "translations"  # of the kernel's documentation, into Chinese, Italian, Japanese, Korean and Spanish

BLOCKS = {"article", "blockquote", "br", "dd", "div", "dl", "dt", "figure", "hr", "li", "ol", "p", "pre", "section", "table"}
BLOCKS |= {"tr", "ul", *(f"h{level}" for level in range(1, 7))}
CELLS = {"td", "th"}
DROPPED = {"script", "style", "head", "nav", "footer", "svg", "form", "select", "button"}
BOILERPLATE = re.compile(
    r"\b(t-navbar|t-nv|toc|toctree-wrapper|contents|sphinxsidebar|related|footer|breadcrumbs?|headerlink|editsection|catlinks|"
    r"noprint|printfooter|siteSub|contentSub|mw-js-message|jump-to-nav)\b"
)
INVISIBLE = {0xA0: " ", 0x200B: None, 0x200E: None}  # no-break space, zero-width space, left-to-right mark


class Text(HTMLParser):
    """The text of an HTML page: blocks become lines, whitespace is kept in ``pre``, navigation is dropped."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self.dropped, self.depth, self.pre = "", 0, 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin a block, or a part that is dropped: its depth counts elements of the same name until it ends."""
        if self.depth:
            self.depth += tag == self.dropped
            return
        names = " ".join(value or "" for name, value in attrs if name in ("id", "class", "role"))
        if tag in DROPPED or (tag not in ("body", "html") and BOILERPLATE.search(names)):
            self.dropped, self.depth = tag, 1
        elif tag in BLOCKS:
            self.pre += tag == "pre"
            self.pieces.append("\n")
        elif tag in CELLS:
            self.handle_data(" ")

    def handle_endtag(self, tag: str) -> None:
        """End a block or a dropped part."""
        if self.depth:
            self.depth -= tag == self.dropped
        elif tag in BLOCKS:
            self.pre -= tag == "pre" and self.pre > 0
            self.pieces.append("\n\n" if tag in ("p", "pre", "table") else "\n")

    def handle_data(self, data: str) -> None:
        """Text between tags."""
        if not self.depth:
            if not self.pre:
                data = re.sub(r"\s+", " ", data)
                data = data.lstrip() if self.pieces and self.pieces[-1][-1:].isspace() else data
            if data:
                self.pieces.append(data)


def html_text(page: str) -> str:
    """The text of an HTML page."""
    parser = Text()
    parser.feed(page)
    parser.close()
    return "".join(parser.pieces)


def tidy(text: str) -> str:
    """``text`` with one kind of line end, no trailing spaces, and at most one empty line in a row."""
    lines = "\n".join(line.rstrip() for line in text.translate(INVISIBLE).splitlines())
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n") + "\n"


def read(path: Path) -> str:
    """The text of a file that may be compressed; what is not UTF-8 is read as Windows-1252."""
    data = gzip.decompress(path.read_bytes()) if path.suffix in (".gz", ".dz") else path.read_bytes()
    return decode(data)


def decode(data: bytes) -> str:
    """``data`` as UTF-8, or as Windows-1252 where it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("cp1252", errors="replace")


def number(digits: str) -> int:
    """A number of a dictionary's index, in base 64."""
    value = 0
    for digit in digits:
        value = 64 * value + "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/".index(digit)
    return value


def dictionary(path: Path) -> Iterator[tuple[str, str]]:
    """Name and text of the pages of a dictionary in dictd's format, ``NAME.dict.dz`` with ``NAME.index``."""
    name = path.name.removesuffix(".dict.dz")
    data, spans = gzip.decompress(path.read_bytes()), set()
    for line in path.with_name(f"{name}.index").read_text().splitlines():
        headword, *span = line.split("\t")
        if not headword.startswith("00-"):  # about the dictionary itself
            spans.add((number(span[0]), number(span[1])))
    page, first = b"", 0
    for start, size in [*sorted(spans), (len(data), 0)]:
        if page and (len(page) >= DICTIONARY_PAGE or not size):
            yield f"{name}/{first:09}", tidy(decode(page))
            page = b""
        first = first if page else start
        page += b"\n" + data[start : start + size] if page else data[start : start + size]


def page_name(path: Path, root: Path) -> str | None:
    """The name that all forms of a page share (source, HTML), None for a file that is not a page."""
    path = path.relative_to(root)
    name = path.name.removesuffix(".gz")
    if not name.endswith(PAGES) or TRANSLATED in path.parts or GENERATED.fullmatch(name):
        return None
    while name.endswith(PAGES):
        name = name.rpartition(".")[0]
    return "/".join([*(part for part in path.parts[:-1] if part not in FORMS), name])


def pages(root: Path, progress: str = "") -> Iterator[tuple[str, str]]:
    """Name and text of every page under ``root``, sorted: of several forms of one page the longest text."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink()]
    forms: dict[str, list[Path]] = {}
    for path in files:
        if path.name.endswith(".dict.dz"):
            yield from dictionary(path)
        elif name := page_name(path, root):
            forms.setdefault(name, []).append(path)
    for name in track(sorted(forms), progress, disable=not progress, transient=True):
        texts = [tidy(html_text(read(path)) if ".html" in path.suffixes else read(path)) for path in forms[name]]
        yield name, max(texts, key=len)


def selected(documents: Iterable[tuple[str, str]], seen: set[bytes]) -> Iterator[tuple[str, str]]:
    """``documents`` without exact duplicates (of each other and of ``seen``, which grows) and without near-empty ones."""
    for name, text in documents:
        key = digest(text)
        if len(text.encode()) >= SHORTEST and key not in seen:
            seen.add(key)
            yield name, text


def digest(text: str) -> bytes:
    """What identifies a text."""
    return hashlib.sha256(text.encode()).digest()


def command(*arguments: str, folder: Path, hint: str) -> str:
    """The output of a command; if it fails, an error with its last line and a hint."""
    if shutil.which(arguments[0]) is None:
        raise SystemExit(f"{arguments[0]} is not installed: {hint}")
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{(done.stderr.strip() or done.stdout.strip() or 'failed').splitlines()[-1]}: {hint}")
    return done.stdout.strip()


def package_file(package: str, version: str, folder: Path) -> Path:
    """The .deb file of ``package`` in ``folder``, of any version if that is empty, downloaded if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (there := sorted(folder.glob(f"{package}_{version or '*'}_*.deb"))):
        with tempfile.TemporaryDirectory(dir=folder) as empty:  # an interrupted download leaves no half of a file
            print(f"{package}: downloading", flush=True)
            hint = (
                f"run `apt-get update`, or choose packages that this Debian has with --packages (`apt-cache search -n doc`), "
                f"or put {package}_VERSION_all.deb from https://packages.debian.org into {folder}"
            )
            command("apt-get", "download", f"{package}={version}" if version else package, folder=Path(empty), hint=hint)
            for path in Path(empty).glob("*.deb"):
                there.append(path.rename(folder / path.name))
    return there[-1]


def build(package: str, to: Path, before: str, seen: set[bytes]) -> dict[str, str | int]:
    """Write ``to/text/PACKAGE.parquet`` (columns package, page, text) unless it is there, and describe it.

    ``package`` is a name, or a name with a version: ``linux-doc-6.1=6.1.190-1``. ``before`` names the packages that came before
    it, which decide what counts as a duplicate.
    """
    package, _, version = package.partition("=")
    deb = package_file(package, version, to / "packages")
    hint = f"delete {deb} to download it again"
    version = command("dpkg-deb", "--field", str(deb), "Version", folder=to, hint=hint)
    identity = f"rules={RULES} {before}{package}={version}"
    file = to / "text" / f"{package}.parquet"
    if file.exists() and (pq.read_schema(file).metadata or {}).get(b"identity") == identity.encode():
        texts = pq.read_table(file, columns=["text"])["text"].to_pylist()
        seen.update(map(digest, texts))
        return summary(package, version, texts)
    with tempfile.TemporaryDirectory() as folder:
        command("dpkg-deb", "--extract", str(deb), folder, folder=to, hint=hint)
        rows = list(selected(pages(Path(folder), package), seen))
        if not rows:
            raise SystemExit(f"{package} has no pages ({', '.join(PAGES)} or a dictionary): choose others with --packages")
        for copyright_file in sorted(Path(folder).glob("usr/share/doc/*/copyright")):
            shutil.copy(copyright_file, to / "licences" / f"{package}.txt")
    names, texts = zip(*rows, strict=True)
    columns = {"package": [package] * len(rows), "page": names, "text": texts}
    partial = file.with_suffix(".partial")
    pq.write_table(
        pa.table(columns).replace_schema_metadata({"identity": identity}), partial, compression="zstd", row_group_size=1024
    )
    partial.rename(file)
    return summary(package, version, texts)


def summary(package: str, version: str, texts: Sequence[str]) -> dict[str, str | int]:
    """The size of a package's part of the corpus."""
    size = sum(len(text.encode()) for text in texts)
    return {"package": package, "version": version, "documents": len(texts), "bytes": size}


def main(arguments: list[str] | None = None) -> None:
    """Build the corpus, package after package, and print its size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("corpus"), help="folder of the result; run again to resume")
    parser.add_argument("--packages", nargs="+", default=PACKAGES, help="names, or name=version (default: %(default)s)")
    options = parser.parse_args(arguments)
    to = options.to.resolve()
    packages = sorted(set(options.packages))
    for name in ("text", "packages", "licences"):
        (to / name).mkdir(parents=True, exist_ok=True)
    before, seen, results = "", set[bytes](), []
    for package in packages:
        results.append(build(package, to, before, seen))
        before += "{package}={version} ".format_map(results[-1])
        line = "{package} {version}: {documents:,} documents, {bytes:,} bytes"
        print(line.format_map(results[-1]), flush=True)
    for file in (to / "text").glob("*.parquet"):
        if file.stem not in {result["package"] for result in results}:
            print(f"note: {file} is of an earlier run with other packages; delete it, or training reads it as well")
    documents, size = (sum(int(result[key]) for result in results) for key in ("documents", "bytes"))
    (to / "summary.json").write_text(json.dumps({"documents": documents, "bytes": size, "packages": results}, indent=2) + "\n")
    print(f"together: {documents:,} documents, {size:,} bytes in {to / 'text'}")


if __name__ == "__main__":
    main()
