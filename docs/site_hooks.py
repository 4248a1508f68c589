"""What the site of the documents needs beside MkDocs itself.

- The navigation is the lists of ``docs/README.md``. A page with a folder of its name brings that
  folder's pages along.
- Documents link to files of the repository by relative paths. Each linked file outside ``docs/``
  gets a page below ``files/``: Markdown as it is, another file as a listing, a folder as a list.
- Headings have the anchors that links to them have in a checkout.
- No page loads anything from another host; one that would fails the build.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

_ENTRY = re.compile(r"^## (.+)$|^- \[([^\]]+)\]\(([^)]+)\)", re.MULTILINE)
_TARGET = re.compile(r"(?<=\]\()(?![a-z]+:|#)[^)#\s]+")
_LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^>]+")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json"}


def on_config(config: MkDocsConfig) -> None:
    """Make the navigation, and set how anchors are named."""
    config.mdx_configs["toc"]["slugify"] = _anchor
    nav: list[dict[str, Any]] = [{"Documents": "README.md"}]
    for section, title, target in _ENTRY.findall((DOCS / "README.md").read_text("utf-8")):
        if section:
            nav.append({section: []})
            continue
        uri = _uri(_resolved(target, "docs/README.md"))
        folder = DOCS / uri.removesuffix(".md")
        entry = [{"Overview": uri}, *_pages(folder)] if folder.is_dir() else uri
        next(iter(nav[-1].values())).append({title: entry})
    config.nav = nav


def _anchor(heading: str, _: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _pages(folder: Path) -> list[Any]:
    return [
        {each.name.capitalize(): _pages(each)} if each.is_dir() else str(each.relative_to(DOCS))
        for each in sorted(folder.iterdir())
    ]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages of linked files, and of those that these link to in turn."""
    sources = [str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md")]
    known = set(sources)
    while sources:
        source = sources.pop()
        for target in _TARGET.findall(_markdown(source)):
            path = _resolved(target, source)
            if path in known or path.startswith("docs/") or not (ROOT / path).exists():
                continue  # of what does not exist MkDocs says which page links to it
            known.add(path)
            if path.endswith(".md") or (ROOT / path).is_dir():
                sources.append(path)
                text = _relinked(_markdown(path), path)
            else:
                text = _listing(path)
            page = File.generated(config, _uri(path), content=text)
            page.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(page)


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Point links that leave ``docs/`` to the pages of those files."""
    uri = page.file.src_uri
    return markdown if page.file.generated_by else _relinked(markdown, f"docs/{uri}")


def on_post_page(output: str, page: Page, **_: object) -> None:
    """Check that the page loads nothing from another host.

    Raises:
        PluginError: it does.
    """
    if found := _LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads from another host: {found[0]}")


def _markdown(path: str) -> str:
    """A document, or a folder's files as links."""
    file = ROOT / path
    if not file.is_dir():
        return file.read_text("utf-8")
    names = sorted(each.name for each in file.iterdir() if each.is_file())
    return f"# `{path}`\n\n" + "".join(f"- [{name}]({file.name}/{name})\n" for name in names)


def _listing(path: str) -> str:
    file = ROOT / path
    language = _LANGUAGES.get(file.suffix, "text")
    head = f"---\nsearch: {{exclude: true}}\n---\n\n# `{path}`\n\n"
    return f"{head}``````{language}\n{file.read_text('utf-8')}``````\n"


def _relinked(text: str, source: str) -> str:
    """``text`` of ``source`` with links as they are between the pages of the site."""
    here = Path(_uri(source)).parent
    return _TARGET.sub(lambda found: os.path.relpath(_uri(_resolved(found[0], source)), here), text)


def _resolved(target: str, source: str) -> str:
    """The path in the repository of what ``source`` links to."""
    return str((ROOT / source).parent.joinpath(target).resolve().relative_to(ROOT))


def _uri(path: str) -> str:
    """Where the page of a file of the repository is in the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"files/{path}" if path.endswith(".md") else f"files/{path}.md"
