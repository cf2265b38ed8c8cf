"""Prints the pinned packages of an extra of pyproject.toml, "dev" or the one named, one in a line.

Python 3.10 has no TOML library.
"""

import re
import sys
from pathlib import Path

text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
extra = sys.argv[1] if len(sys.argv) > 1 else "dev"
block = re.search(rf"^{extra} = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
assert block is not None, f"pyproject.toml has no extra {extra!r}"
print("\n".join(re.findall(r'"([^"]+)"', block.group(1))))
