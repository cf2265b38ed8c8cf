"""Hooks of mkdocs: they add the pages that are made from other files, and make links those of the site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import message_pages
import site_pages
from messages import messages
from mkdocs.structure.files import File, Files

_messages: list[message_pages.MessagePage] = []


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the files that docs/ does not have."""
    _messages[:] = message_pages.message_pages(messages())
    files.remove(files.src_uris["README.md"])  # mkdocs would make it the first page
    for path, text in site_pages.generated(_messages).items():
        files.append(File.generated(config, path, content=text))
    style = Path(__file__).with_name("site.css")
    files.append(File.generated(config, style.name, abs_src_path=str(style)))
    return files


def on_nav(nav: Any, *, config: Any, files: Files) -> Any:
    """The logo leads to the file of the first page, which mkdocs finds only outside sections."""
    nav.homepage = next(page for page in nav.pages if page.file.src_uri == "index.md")
    return nav


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """The pages of docs/ for the site."""
    if page.file.generated_by is not None:
        return markdown
    return site_pages.of_docs(page.file.src_uri, markdown, _messages)
