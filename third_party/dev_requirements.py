"""Prints the pinned packages of pyproject.toml's extra "dev" for make. Python 3.10 has no TOML library."""

import re
from pathlib import Path

text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
block = re.search(r"^dev = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
assert block is not None, "pyproject.toml has no extra 'dev'"
print(" ".join(re.findall(r'"([^"]+)"', block.group(1))))
