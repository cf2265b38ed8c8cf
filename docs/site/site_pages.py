"""The pages of the site that docs/ does not have: made from other files, from docstrings and from messages."""

from __future__ import annotations

import api
import gallery
import message_pages
from links import ROOT, examples, pages, read, relink


def generated(messages: list[message_pages.MessagePage]) -> dict[str, str]:
    """Their Markdown, by their path in the site. Links are those of the site."""
    programs = {pages()[f"examples/{path.name}"]: gallery.source(path) for path in examples()}
    moved = {page: file for file, page in pages().items() if file != f"docs/{page}" and page not in programs}
    made = {page: relink(read(ROOT / file), file, page) for page, file in moved.items()} | programs
    made["license.md"] = f"# License\n\n```text\n{read(ROOT / 'LICENSE')}```\n"
    made["gallery.md"] = gallery.gallery()
    made |= {api.page(module): api.markdown(module) for module in api.modules()}
    made[message_pages.INDEX] = message_pages.index(messages)
    return made | {page.path: message_pages.markdown(page) for page in messages}


def of_docs(name: str, text: str, messages: list[message_pages.MessagePage]) -> str:
    """The text of docs/NAME for the site: its links, and a list of the messages that it explains."""
    text = relink(text, f"docs/{name}", name)
    explained = [page for page in messages if f"{page.group}.md" == name]
    if not explained:
        return text
    listed = message_pages.links_to(explained, name).replace("\n", "\n    ")
    return f'{text}\n??? note "The messages that this page explains"\n\n    {listed}\n'
