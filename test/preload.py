"""What the fork server of `children.py` imports before it forks: a new interpreter takes 6.5 s for it, a child none.

The server never starts torch_xla's runtime and never imports torch_xla_donate: a child inherits neither clients nor
hooks, and reads the settings of both from its own environment.
"""

import atexit
import contextlib
import gc
import os
import sys
from pathlib import Path

# Or torch 2.8 starts a thread and processes that compile for Triton, as soon as torch_xla imports its inductor.
os.environ["TORCH_WARM_POOL"] = "0"

import numpy  # noqa: F401
import pytest
import torch_xla.core.xla_model
import torch_xla.debug.metrics
import torch_xla.distributed.spmd
import torch_xla.experimental.gradient_accumulation
import torch_xla.experimental.scan
import torch_xla.runtime  # noqa: F401

with contextlib.suppress(ImportError):  # the pinned one has no wheel for Python 3.10
    import jax  # noqa: F401


class _RewriteAssertions:
    """pytest's import hook shows the values of a failed assertion. pytest takes it away when it ends; this keeps it."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self) -> int:
        pytest.register_assert_rewrite("helpers")
        self.finders = list(sys.meta_path)
        return 0


rewriting = _RewriteAssertions()
pytest.main(
    ["--noconftest", "--capture=no", "-o", "addopts=", f"--rootdir={Path(__file__).parents[1]}"], plugins=[rewriting]
)
sys.meta_path[:] = rewriting.finders

threads = os.listdir("/proc/self/task")
# A child has only the thread that forks.
assert len(threads) == 1, f"found {len(threads)} threads, expected 1: an import started one; take it out of the list"
atexit.register(os._exit, 0)  # an interpreter with torch takes seconds to end
# Frozen objects cost a child's collector nothing, and their pages stay shared.
gc.collect()
gc.freeze()
