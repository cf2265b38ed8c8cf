"""A page for each message: its text, cause and remedy, and the passage of docs/ that explains it."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from links import ROOT, anchor, read, relink
from messages import GAP, Message, without_see

INDEX = "messages/index.md"
# How well a passage of this kind explains a message, the best last.
_KINDS = ("paragraph", "item", "fence", "row")
# A sentence that begins so continues the cause; the others are imperatives.
_STATES = re.compile(r"(?:With|The|They|A|An|It|This|These|That|torch_xla|…) ")
_BLOCK = re.compile(r"^```(?s:.*?)^```$|^#+ [^\n]+$|(?:^(?!```|#+ )[^\n]+(?:\n|\Z))+", re.MULTILINE)
# They list messages, and explain none.
_LISTS = {"README", "glossary", "reference", "troubleshooting"}


@dataclass(frozen=True)
class Passage:
    """A part of a page: a paragraph, an item of a list, a fenced block, or a row of a table.

    Attributes:
        kind: ``heading``, ``paragraph``, ``item``, ``fence`` or ``row``.
        text: its Markdown.
        heading: the heading above it.
        columns: for a row, its cells by the head of their column.
    """

    kind: str
    text: str
    heading: str
    columns: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class MessagePage:
    """A page of the site. Equal messages of several lines share one.

    Attributes:
        path: its path in the site.
        title: what happened.
        message: the message.
        sources: files of the code that have it.
        group: name of the page of docs/ that explains it.
        passages: the passages that do; the first of the message's kind, if it is a row.
        heading: the heading above them.
    """

    path: str
    title: str
    message: Message
    sources: tuple[str, ...]
    group: str
    passages: tuple[Passage, ...]
    heading: str


@cache
def words(text: str) -> str:
    """The text with its line breaks and runs of blanks made one blank: pages break lines where they like."""
    return " ".join(text.split())


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip().strip("|"))]


@cache
def passages(page: str) -> tuple[Passage, ...]:
    """The passages of docs/PAGE.md in their order."""
    return tuple(_passages(re.sub(r"<!--.*?-->\n?", "", read(ROOT / "docs" / f"{page}.md"))))


def _passages(text: str) -> Iterator[Passage]:
    heading = ""
    for block in (found[0].rstrip("\n") for found in _BLOCK.finditer(text)):
        if block.startswith("```"):
            yield Passage("fence", block, heading)
        elif block.startswith("#"):
            heading = block.lstrip("# ")
            yield Passage("heading", block, heading)
        elif block.startswith("|"):
            head, _, *rows = block.split("\n")
            for row in rows:
                yield Passage("row", row, heading, tuple(zip(cells(head), cells(row))))
        else:
            is_list = re.match(r"- |\d+\. ", block)
            for item in re.split(r"\n(?=- |\d+\. )", block) if is_list else [block]:
                yield Passage("item" if is_list else "paragraph", item, heading)


def _best(message: Message, page: str) -> tuple[tuple[int, int], int]:
    """How well a page explains a message, and the number of its best passage. (0, 0) if it does not have it."""
    scores = []
    for passage in passages(page):
        text, score = words(passage.text), (0, 0)
        if passage.kind in _KINDS and words(message.longest) in text:
            score = sum(words(piece) in text for piece in message.pieces), _KINDS.index(passage.kind) + 1
        scores.append(score[::-1] if message.kind == "reason" else score)  # the tables of reasons have cause and fix
    best = max(scores)
    return best, scores.index(best)


def _around(found: tuple[Passage, ...], best: int) -> tuple[Passage, ...]:
    """The example that prints a message: its lead, its code, its output, and what follows."""
    if found[best].kind != "fence":
        return (found[best],)
    first = best - (found[best - 1].kind == "fence")
    lead = first
    while found[lead - 1].kind in ("paragraph", "item"):
        lead -= 1
    if found[lead - 1].kind == "fence":  # the text between two examples belongs to the second if it leads to it
        lead = first - found[first - 1].text.endswith(":")
    end = best + 1
    while end < len(found) and found[end].kind in ("paragraph", "item"):
        end += 1
    return found[lead : end - found[end - 1].text.endswith(":")]


def message_pages(messages: Iterable[Message]) -> list[MessagePage]:
    """The pages, in the order of the pages of docs/ and of the passages there.

    Raises ValueError for a message that no page explains.
    """
    names = {path.stem for path in (ROOT / "docs").glob("*.md")} - _LISTS
    in_order = sorted(names, key=lambda name: (name != "unusable", name))  # of equal pages the first
    alike: dict[str, list[Message]] = {}
    for message in messages:
        alike.setdefault(message.text, []).append(message)
    placed = []
    for same in alike.values():
        message = same[0]
        group = max([message.page] if message.page else in_order, key=lambda name: _best(message, name)[0])
        if _best(message, group)[0] == (0, 0):
            raise ValueError(f"no page of docs/ explains {message.text!r}, of {message.where}. Write it on one.")
        placed.append((group, _best(message, group)[1], same))
    placed.sort(key=lambda place: place[:2])
    taken: set[str] = set()
    return [_page(same, group, best, taken) for group, best, same in placed]


def _page(same: list[Message], group: str, best: int, taken: set[str]) -> MessagePage:
    message, found = same[0], passages(group)
    cause, remedy = cause_and_remedy(message)
    title = re.sub(r"[.:]$", "", cause if len(re.findall(r"\w+", cause)) > 2 else f"{cause} {remedy}")
    if len(title) > 120:
        title = f"{title[:118].rpartition(' ')[0]} {GAP}"
    return MessagePage(
        path=f"messages/{_slug(message, taken)}.md",
        title=title,
        message=message,
        sources=tuple(sorted({message.file for message in same})),
        group=group,
        passages=_around(found, best),
        heading=found[best].heading,
    )


def _slug(message: Message, taken: set[str]) -> str:
    """The first words of the message: eight, and more if another page has those."""
    parts = re.findall(r"[a-z0-9]+", without_see(message.text).lower())
    count = 8
    while (slug := "-".join(parts[:count])) in taken:
        count += 1
        parts += [str(count)] * (count > len(parts))
    taken.add(slug)
    return slug


def cause_and_remedy(message: Message) -> tuple[str, str]:
    """The sentences of a message that say what happened, and those that say what to do.

    The remedy is empty if the message has none, as a reason of the report.
    """
    text = re.sub(r"\s*Nothing was (?:marked|donated)\.|No mark was cancelled\.", "", without_see(message.text))
    text = words(text)
    if message.kind == "reason":
        return text, ""
    first, *rest = re.split(r"(?<=[.!?]) (?=[A-Z…])", text)
    while rest and _STATES.match(rest[0]):
        first = f"{first} {rest.pop(0)}"
    return first, " ".join(rest)


# --- Markdown ---

# A search for the words of a message finds its page first.
_BOOST = "---\nsearch:\n  boost: 2\n---\n\n"


def escape(text: str) -> str:
    """Plain text as Markdown."""
    return re.sub(r"([\\`*_\[\]<>#|{}])", r"\\\1", text)


@cache
def titles() -> dict[str, str]:
    """The heading of each page of docs/."""
    return {path.stem: read(path).partition("\n")[0].removeprefix("# ") for path in (ROOT / "docs").glob("*.md")}


def _section(page: MessagePage) -> str:
    """A link to the section of docs/ that explains the message."""
    title = titles()[page.group]
    name = title if page.heading == title else f"{title}: {page.heading}"
    return f"[{name}](../{page.group}.md#{anchor(page.heading)})"


def markdown(page: MessagePage) -> str:
    """The text of a page."""
    message = page.message
    cause, remedy = cause_and_remedy(message)
    kind = "" if message.kind == "reason" else f"{message.kind}: "
    columns = page.passages[0].columns
    facts = [("Cause", escape(cause)), ("Remedy", escape(remedy))] if remedy else []
    facts += [(head.capitalize(), relink(cell, f"docs/{page.group}.md", page.path)) for head, cell in columns[1:]]
    lines = [
        f"{_BOOST}# {escape(page.title)}",
        f"``` {{ .text .message }}\n{kind}{message.text}\n```",
        *(f"**{name}.** {text}" for name, text in facts),
    ]
    if columns:
        lines.append(f"From the table in {_section(page)}.")
    else:
        lines.append(f"## {_section(page)}")
        lines.append(relink("\n\n".join(part.text for part in page.passages), f"docs/{page.group}.md", page.path))
    lines.append(f"In the code: {', '.join(f'`{source}`' for source in page.sources)}. [All messages](index.md)")
    return "\n\n".join(lines) + "\n"


def links_to(pages: Iterable[MessagePage], start: str) -> str:
    """A list of links to pages. start: path in the site of the page that has the list."""
    folder = posixpath.dirname(start) or "."
    return "\n".join(f"- [{escape(page.title)}]({posixpath.relpath(page.path, folder)})" for page in pages)


def index(pages: list[MessagePage]) -> str:
    """The list of all messages, by the page of docs/ that explains them."""
    groups = list(dict.fromkeys(page.group for page in pages))
    lines = ["# All messages", "`…` stands for what the program fills in."]
    for group in groups:
        lines.append(f"## {titles()[group]}")
        lines.append(links_to([page for page in pages if page.group == group], INDEX))
        lines.append(f"Explained in [{group}.md](../{group}.md).")
    return "\n\n".join(lines) + "\n"
