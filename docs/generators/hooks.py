"""What MkDocs does not do by itself: pages of the repository's root, files outside `docs`, the list of decisions."""

import json
import posixpath
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from shoal.policies.schema import schema

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
ROOT_PAGES: Final = {
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "README.md",
}
"""Pages at the root, and where they are on the site. The landing page stands for the README."""
_LOADED: Final = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)")
_LINK: Final = re.compile(r"(?<=\]\()([\w./-]+)(#[\w-]*)?(?=\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    pages = [f"decisions/{path.name}" for path in sorted((DOCS / "decisions").glob("*.md"))]
    _replace(config.nav or [], "decisions", ["decisions/README.md", *(each for each in pages if "README" not in each)])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, place in ROOT_PAGES.items():
        if name != "README.md":
            files.append(File.generated(config, place, content=(ROOT / name).read_text()))
    files.append(File.generated(config, "reference/shoal.schema.json", content=json.dumps(schema(), indent=1)))
    linked = {
        path
        for page in files.documentation_pages()
        for target, _ in _LINK.findall(page.content_string)
        if (path := _outside(page.src_uri, target)) is not None and path.as_posix() not in ROOT_PAGES
    }
    for path in sorted(linked):
        place = f"files/{path.as_posix()}{'.txt' if path.suffix == '.md' else ''}"
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that leave `docs` lead to where those files are on the site."""
    here = page.file.src_uri
    if here == "README.md":
        page.meta["hide"] = ["navigation"]

    def link_on_site(found: re.Match[str]) -> str:
        path = _outside(here, found[1])
        if path is None:
            return _inside(here, found[1]) + (found[2] or "")
        place = ROOT_PAGES.get(path.as_posix(), f"files/{path.as_posix()}{'.txt' if path.suffix == '.md' else ''}")
        return posixpath.relpath(place, posixpath.dirname(here) or ".") + (found[2] or "")

    return _LINK.sub(link_on_site, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Raises PluginError if a page loads anything from another server."""
    for page in Path(config.site_dir).rglob("*.html"):
        if loaded := _LOADED.search(page.read_text()):
            raise PluginError(f"{page.relative_to(config.site_dir)} loads {loaded[1]}")


def _source(here: str) -> Path:
    """The folder that a page's links start from, below the root."""
    named = {place: name for name, place in ROOT_PAGES.items() if name != "README.md"}
    return Path(named[here]).parent if here in named else Path("docs", here).parent


def _outside(here: str, target: str) -> Path | None:
    """The file below the root that a link of the page leads to, if it is one outside `docs`."""
    path = Path(posixpath.normpath((_source(here) / target).as_posix()))
    if path.parts[:1] in (("docs",), ("..",)) or not (ROOT / path).is_file():
        return None
    return path


def _inside(here: str, target: str) -> str:
    """The same link, seen from where the page is on the site."""
    if here in ROOT_PAGES.values() and here != "README.md" and target.startswith("docs/"):
        return target.removeprefix("docs/")
    return target


def _replace(nav: list[Any], name: str, pages: list[str]) -> None:
    """Puts pages in the place of the entry that has this name as its value."""
    for each in nav:
        if isinstance(each, dict):
            for title, inside in each.items():
                if inside == name:
                    each[title] = pages
                elif isinstance(inside, list):
                    _replace(inside, name, pages)
