"""The pages of docs/, and their sections, which the messages name: `python -m torch_xla_donate explain WORD`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).resolve().parent
# A wheel has the pages inside the package. In a checkout they are beside it.
FOLDERS = (_PACKAGE / "docs", _PACKAGE.parent / "docs")

#: The words that messages name, and names that pages had in earlier versions: the page or the section of each.
WORDS = {
    "advise": "errors#command-line",
    "ahead": "errors#ahead-of-time",
    "around_the_step": "spmd#threads-and-processes",
    "auto": "automatic",
    "call_jax": "errors#computations-and-jax-functions",
    "cancel_donation": "errors#cancelled-marks",
    "checkpoints": "recipes#checkpoints",
    "compile_errors": "errors#functions-of-compile",
    "debug_nans": "errors#debug_nans-and-reuse",
    "donate_buffer": "marks",
    "dynamic_sizes": "recipes#dynamic-sizes",
    "eager_mode": "recipes#eager-mode",
    "glossary": "reference#glossary",
    "gradient_accumulation": "errors#gradient-accumulation",
    "how_it_works": "internals",
    "import_errors": "errors#import",
    "into": "errors#into",
    "kv_cache": "recipes#kv-caches",
    "limits": "safety#limits",
    "memory_model": "aot#memory-of-a-training-step-a-formula-and-llama",
    "memory_truth": "performance#memory-with-and-without-donation",
    "modes": "errors#modes",
    "pure": "errors#pure-functions",
    "reasons": "errors#the-reasons",
    "refused": "errors#refused-donations",
    "report": "errors#report-and-tests",
    "scan": "errors#loops",
    "support": "safety#versions-and-platforms",
    "switched_off": "errors#settings",
    "testing": "errors#report-and-tests",
    "torch_compile": "errors#torchcompile",
    "tpu": "errors#the-tpu-compiler",
    "troubleshooting": "errors",
    "unusable": "errors#unusable-donations",
    "unusable_examples": "errors#unusable-donations",
    "use_after_donation": "errors#use-after-donation",
    "user_computations": "errors#computations-and-jax-functions",
    "verify": "errors#command-line",
    "which": "quickstart#which-one-do-i-use",
}


class Part(NamedTuple):
    """A piece of a page, from one heading to the next of any level."""

    anchor: str
    level: int
    text: str


def titles() -> dict[str, str]:
    """The heading of each page, by the page's name."""
    found = {path.stem: path.read_text(encoding="utf-8").partition("\n")[0] for path in _folder().glob("*.md")}
    return {name: found[name].removeprefix("# ") for name in sorted(found, key=str.lower)}


def text(name: str) -> str:
    """The Markdown of a page, a section (``PAGE#ANCHOR``), or one of `WORDS`. Raises KeyError for another name."""
    page, _, section = WORDS.get(name, name).partition("#")
    if page not in titles():
        raise KeyError(name)
    parts = _parts(page)
    first = next((i for i, part in enumerate(parts) if part.anchor == section), None) if section else 0
    if first is None:
        raise KeyError(name)
    level = parts[first].level
    last = next((i for i in range(first + 1, len(parts)) if parts[i].level <= level), len(parts))
    return "".join(part.text for part in parts[first:last])


def containing(words: str) -> list[str]:
    """The sections that contain a text. Case, line breaks and runs of blanks do not matter."""
    wanted = _normal(words)
    return [
        f"{page}#{part.anchor}" if part.level > 1 else page
        for page in titles()
        for part in _parts(page)
        if wanted in _normal(part.text)
    ]


def anchor(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _parts(page: str) -> list[Part]:
    parts: list[Part] = []
    in_code = False
    for line in (_folder() / f"{page}.md").read_text(encoding="utf-8").splitlines(keepends=True):
        in_code ^= line.startswith("```")
        if line.startswith("#") and not in_code:
            marks, _, heading = line.strip().partition(" ")
            parts.append(Part(anchor(heading), len(marks), ""))
        parts[-1] = parts[-1]._replace(text=parts[-1].text + line)
    return parts


def _normal(words: str) -> str:
    return " ".join(words.casefold().split())


def _folder() -> Path:
    for folder in FOLDERS:
        if (folder / "errors.md").is_file():
            return folder
    raise FileNotFoundError(
        f"torch_xla_donate did not find its pages in {' or '.join(map(str, FOLDERS))}. Install the package again."
    )
