"""What `import torch_xla_donate` loads."""

from __future__ import annotations

from helpers import run_script


def test_a_training_process_loads_no_tools() -> None:
    """They come with the first use: `advise`, the command line, and the text of a report."""
    source = """
        import sys, torch_xla
        before = set(sys.modules)
        import torch_xla_donate
        loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
        tools = {"ast", "difflib", "tokenize", "jinja2", "matplotlib", "rich", "click"} & loaded
        assert not tools, tools
        assert not [name for name in sys.modules if name.startswith("torch_xla_donate._tools")]
        assert "advise" in dir(torch_xla_donate) and callable(torch_xla_donate.advise)
        assert str(torch_xla_donate.donation_report()) and "rich" in sys.modules
    """
    run_script(source)
