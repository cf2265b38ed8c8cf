"""The pages of docs/, which the messages name: `python -m torch_xla_donate explain PAGE`."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
# A wheel has the pages inside the package. In a checkout they are beside it.
FOLDERS = (_PACKAGE / "docs", _PACKAGE.parent / "docs")


def titles() -> dict[str, str]:
    """The heading of each page, by the page's name."""
    found = {path.stem: path.read_text(encoding="utf-8").partition("\n")[0] for path in _folder().glob("*.md")}
    return {name: found[name].removeprefix("# ") for name in sorted(found, key=str.lower)}


def text(page: str) -> str:
    """The Markdown of a page. Raises KeyError if there is no page of that name."""
    if page not in titles():
        raise KeyError(page)
    return (_folder() / f"{page}.md").read_text(encoding="utf-8")


def containing(words: str) -> list[str]:
    """The names of the pages that contain a text. Case, line breaks and runs of blanks do not matter."""
    wanted = _normal(words)
    return [page for page in titles() if wanted in _normal(text(page))]


def _normal(words: str) -> str:
    return " ".join(words.casefold().split())


def _folder() -> Path:
    for folder in FOLDERS:
        if (folder / "unusable.md").is_file():
            return folder
    raise FileNotFoundError(
        f"torch_xla_donate did not find its pages in {' or '.join(map(str, FOLDERS))}. Install the package again."
    )
