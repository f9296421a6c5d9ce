"""What MkDocs calls to build the site: pages made from the code, from notebooks and from files beside docs/, and the explorer.

Nothing that is made here is in the repository, so nothing of it can be out of date.
"""

import tempfile
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from dialect import slug, with_captions, with_links, with_lists, without_comments
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebooks import notebook_page
from reference_pages import command_list, command_page, commands, function_list, function_page, functions

from normscope.explorer.export import export_explorer

ROOT = Path(__file__).parent.parent.parent
ROOT_PAGES = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "README.md": "index.md",
}  # files beside docs/ → where they are in the site
EXPLORER = "assets/explorer.html"
_LISTS = {"commands": command_list, "functions": function_list}  # what <!-- generated: NAME --> stands for


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Anchors as GitHub makes them, so that one link is right in both."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is generated, and the files of the repository that pages link to; then expand nav."""
    made = {**_explorer(), **_root_pages(), **_notebooks(files), **_reference(files)}
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    for path in sorted(_linked(files)):
        files.append(File.generated(config, f"repository/{path}", abs_src_path=str(ROOT / path)))
    order = {**config.extra["order"], "reference/commands": list(commands()), "reference/functions": list(functions())}
    config.nav = _expanded(config.nav, {file.src_uri for file in files.documentation_pages()}, order)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A page of the repository as Python-Markdown reads it."""
    for name, listed in _LISTS.items():
        if f"<!-- generated: {name} -->" in markdown:
            markdown = markdown.replace(f"<!-- generated: {name} -->", listed())
    return with_lists(with_captions(without_comments(_linking(markdown, page.file.src_uri))))


def _explorer() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        return {EXPLORER: export_explorer(Path(folder) / "explorer.html").read_bytes()}


def _root_pages() -> dict[str, str]:
    there = {name: uri for name, uri in ROOT_PAGES.items() if (ROOT / name).exists() and uri.startswith("project/")}
    return {uri: (ROOT / name).read_text(encoding="utf-8") for name, uri in there.items()}


def _notebooks(files: Files) -> dict[str, str | bytes]:
    made: dict[str, str | bytes] = {}
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        assert file.abs_src_path is not None
        text, pictures = notebook_page(Path(file.abs_src_path))
        made[_page_of(file.src_uri)] = text
        made |= {str(PurePosixPath(file.src_uri).with_name(name)): data for name, data in pictures.items()}
    return made


def _reference(files: Files) -> dict[str, str]:
    listed, named = commands(), functions()
    pages = {
        *(file.src_uri for file in files.documentation_pages()),
        *(f"reference/commands/{name}.md" for name in listed),
        *(f"reference/functions/{name}.md" for name in named),
    }
    return {
        **{f"reference/commands/{name}.md": command_page(name, command, pages) for name, command in listed.items()},
        **{f"reference/functions/{name}.md": function_page(name, pages) for name in named},
    }


def _page_of(uri: str) -> str:
    return f"{uri.removesuffix('.ipynb')}.md" if uri.endswith(".ipynb") else uri


def _source(uri: str) -> str:
    """The path in the repository of a page of the site's sources."""
    if uri.startswith("repository/"):
        return uri.removeprefix("repository/")
    return next((name for name, page in ROOT_PAGES.items() if page == uri and page != "index.md"), f"docs/{uri}")


def _place(path: str) -> str | None:
    """Where a file of the repository is in the site's sources; None for a folder, which no page shows."""
    if (ROOT / path).is_dir():
        return None
    if path.startswith("docs/"):
        return _page_of(path.removeprefix("docs/"))
    return ROOT_PAGES.get(path, f"repository/{path}")


def _linking(text: str, uri: str, place: Any = _place) -> str:
    download = f"]({PurePosixPath(uri).stem}.ipynb){{ .notebook }}"
    return with_links(text.replace(download, "]\0"), _source(uri), uri, place).replace("]\0", download)


def _linked(files: Files) -> set[str]:
    """The files beside docs/ that pages link to."""
    found: set[str] = set()

    def place(path: str) -> str | None:
        there = _place(path)
        if there == f"repository/{path}" and (ROOT / path).is_file():
            found.add(path)
        return there

    for file in files.documentation_pages():
        _linking(file.content_string, file.src_uri, place)
    return found


def _expanded(nav: Any, pages: set[str], order: dict[str, list[str]]) -> Any:
    """Nav with patterns such as ``folder/*`` replaced by the pages of that folder that it does not name."""
    named = set(_leaves(nav))

    def expand(entry: Any) -> list[Any]:
        if isinstance(entry, dict):
            below = {title: (expand(inside), isinstance(inside, str)) for title, inside in entry.items()}
            return [{title: pages[0] if alone else pages} for title, (pages, alone) in below.items() if pages]
        if isinstance(entry, list):
            return [found for each in entry for found in expand(each)]
        if "*" not in entry:
            return [entry]
        folder = entry.rpartition("/")[0]
        first = [f"{folder}/{name}.md" for name in order.get(folder, ())]
        here = [page for page in pages - named if fnmatch(page, entry) and page.count("/") == entry.count("/")]
        return sorted(here, key=lambda page: (first.index(page) if page in first else len(first), page))

    return expand(nav)


def _leaves(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [leaf for each in (nav.values() if isinstance(nav, dict) else nav) for leaf in _leaves(each)]
