"""The site of `make docs`: its pages, their links, and a page for each message. test/nightly/test_site.py builds it."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

import api
import gallery
import links
import message_pages
import pytest
import site_pages
from messages import Message, messages

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = (ROOT / "docs" / "site" / "mkdocs.yml").read_text(encoding="utf-8")
MESSAGES = messages()
MESSAGE_PAGES = message_pages.message_pages(MESSAGES)
GENERATED = site_pages.generated(MESSAGE_PAGES)
DOCS = {
    path.name: site_pages.of_docs(path.name, path.read_text(encoding="utf-8"), MESSAGE_PAGES)
    for path in (ROOT / "docs").glob("*.md")
    if path.name != "README.md"
}
SITE = DOCS | GENERATED


def without_code(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```$|`[^`]*`", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {links.anchor(re.sub(r"\]\(.*?\)", "]", heading)) for heading in headings}


# --- Navigation and links ---


def test_the_navigation_has_each_page_once() -> None:
    """The list of all messages leads to those of messages, and the gallery to the sources of examples."""
    listed = re.findall(r"^ +- ([\w/.]+\.md)$", CONFIGURATION.partition("\nnav:\n")[2], re.MULTILINE)
    elsewhere = {page for page in SITE if page.startswith(("messages/", "examples/"))} - {message_pages.INDEX}
    assert sorted(listed) == sorted(SITE.keys() - elsewhere)
    for page in elsewhere:
        start = message_pages.INDEX if page.startswith("messages/") else "gallery.md"
        assert f"]({posixpath.relpath(page, posixpath.dirname(start) or '.')})" in SITE[start]


def test_each_link_of_a_page_leads_to_a_page() -> None:
    files = {*SITE, *links.pictures()}
    for page, text in SITE.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
            name, _, fragment = target.partition("#")
            path = posixpath.normpath(posixpath.join(posixpath.dirname(page), name)) if name else page
            assert ":" in name or path in files, f"{page} links to {target}"
            assert not fragment or fragment in anchors(SITE[path]), f"{page} links to {target}"


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("[a](docs/spmd.md#before-the-step)", "[a](spmd.md#before-the-step)"),
        ("[docs](docs/README.md)", "[docs](contents.md)"),
        ("![p](docs/auto.svg)", "![p](auto.svg)"),
        ("[`x.py`](examples/quickstart.py)", "[`x.py`](examples/quickstart.md)"),
        ("[the makefile](Makefile)", "the makefile"),
        ("[elsewhere](https://jax.dev/page)", "[elsewhere](https://jax.dev/page)"),
        ("`[a](docs/spmd.md)`", "`[a](docs/spmd.md)`"),
        ("```text\n[a](docs/spmd.md)\n```", "```text\n[a](docs/spmd.md)\n```"),
    ],
)
def test_links_become_those_of_the_site(markdown: str, expected: str) -> None:
    assert links.relink(markdown, "README.md", "index.md") == expected


def test_links_of_an_excerpt_lead_back_to_its_page() -> None:
    moved = links.relink("[a](#the-reasons), [b](tpu.md)", "docs/unusable.md", "messages/x.md")
    assert moved == "[a](../unusable.md#the-reasons), [b](../tpu.md)"


# --- Messages ---


def test_every_message_has_one_page() -> None:
    assert sorted(page.message.text for page in MESSAGE_PAGES) == sorted({message.text for message in MESSAGES})
    assert len({page.path for page in MESSAGE_PAGES}) == len(MESSAGE_PAGES)


@pytest.mark.parametrize("page", MESSAGE_PAGES, ids=[page.path for page in MESSAGE_PAGES])
def test_a_page_of_a_message_explains_it(page: message_pages.MessagePage) -> None:
    """It has the message, the passage of docs/ with its words, and a link to that section."""
    text = GENERATED[page.path]
    assert page.message.text in text
    assert message_pages.words(page.message.longest) in message_pages.words(
        "".join(passage.text for passage in page.passages)
    )
    assert f"](../{page.group}.md#" in text
    assert page.message.page in (None, page.group)
    assert f"](messages/{posixpath.basename(page.path)})" in DOCS[f"{page.group}.md"]


def test_most_messages_have_a_remedy() -> None:
    """A message without one ends with an error of the compiler, or is a reason, whose remedy the docs have."""
    errors = [page.message for page in MESSAGE_PAGES if page.message.kind != "reason"]
    without = {message.where.partition(":")[0] for message in errors if not message_pages.cause_and_remedy(message)[1]}
    assert without <= {"topology.py", "notices.py", "copies.py", "dump.py"}


def test_cause_and_remedy_are_the_sentences_of_a_message() -> None:
    text = "… is 3. The mesh has 4. Pass 4. Nothing was marked. See `python -m torch_xla_donate explain into`."
    message = Message("x.py:1", "x.py", "ValueError", text, (text,), "into")
    assert message_pages.cause_and_remedy(message) == ("… is 3. The mesh has 4.", "Pass 4.")


def test_a_message_without_a_passage_is_an_error() -> None:
    message = Message("x.py:1", "x.py", "ValueError", "no page has these words", ("no page has these words",), None)
    with pytest.raises(ValueError, match=r"no page of docs/ explains 'no page has these words', of x.py:1"):
        message_pages.message_pages([message])


# --- API and gallery ---


def test_the_api_has_the_public_names() -> None:
    import torch_xla_donate

    names = {f"torch_xla_donate.{name}" for name in torch_xla_donate.__all__ if name not in ("hlo", "testing")}
    names |= {f"torch_xla_donate.hlo.{name}" for name in torch_xla_donate.hlo.__all__}
    pages = [SITE[api.page(module)] for module in api.modules()]
    shown = {name for page in pages for name in re.findall("^::: (.+)$", page, re.MULTILINE)}
    assert names <= shown
    assert {name.rpartition(".")[0] for name in shown - names} <= {"torch_xla_donate.testing"}


def test_the_gallery_has_all_pictures_and_examples() -> None:
    text = gallery.gallery()
    assert sorted(re.findall(r"!\[.+\]\((.+?)\)", text)) == links.pictures()
    assert len(links.examples()) >= 12
    assert all(f"](examples/{path.stem}.md)" in text for path in links.examples())
