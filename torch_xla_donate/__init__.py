"""Buffer donation for PyTorch/XLA: mark tensors with `donate_buffer`, and the next step may reuse their memory."""

import importlib
import warnings
from typing import TYPE_CHECKING

from torch_xla_donate import _config, _lazily

if _config.IS_OFF:
    # Every module that imports `_C` finds this one in its place.
    globals()["_C"] = importlib.import_module("torch_xla_donate._absent")

from torch_xla_donate import _host  # first: it checks the versions and loads `_C`

from torch_xla_donate import _C, _errors, _modes, _report
from torch_xla_donate import hlo, testing
from torch_xla_donate._compile.api import compile
from torch_xla_donate._compile.placeholders import placeholder, placeholder_like
from torch_xla_donate._computations.call_jax import call_jax
from torch_xla_donate._computations.user_computation import user_computation
from torch_xla_donate._errors import DonatedBufferError, DonationError, DonationWarning
from torch_xla_donate._loops.gradient_accumulation import gradient_accumulation
from torch_xla_donate._loops.scan import scan, scan_layers
from torch_xla_donate._marks import cancel_donation, donate_buffer, is_donated
from torch_xla_donate._modes import auto_donate, debug_nans, donation_disabled, expect_donated, set_auto_donate
from torch_xla_donate._report import Donor, DonationReport, HeldInput, Reason, donation_report

if TYPE_CHECKING:
    from torch_xla_donate._tools.advise import advise
    from torch_xla_donate._tools.hints import Advice, Hint

__version__ = "1.0.0"

__all__ = [
    "Advice",
    "DonatedBufferError",
    "DonationError",
    "DonationReport",
    "DonationWarning",
    "Donor",
    "HeldInput",
    "Hint",
    "Reason",
    "advise",
    "auto_donate",
    "call_jax",
    "cancel_donation",
    "compile",
    "debug_nans",
    "donate_buffer",
    "donation_disabled",
    "donation_report",
    "expect_donated",
    "gradient_accumulation",
    "hlo",
    "is_donated",
    "placeholder",
    "placeholder_like",
    "scan",
    "scan_layers",
    "set_auto_donate",
    "testing",
    "user_computation",
]

__getattr__, __dir__ = _lazily.names_of(__name__, {"_tools.advise": ["advise"], "_tools.hints": ["Advice", "Hint"]})

if _config.IS_OFF:
    warnings.warn(
        f"{_errors.SWITCHED_OFF} Unset it to donate. {_errors.see('switched_off')}", DonationWarning, stacklevel=2
    )
else:
    _C.set_callbacks(
        DonatedBufferError,
        _errors.describe_use,
        _report.report_reuse,
        _modes.debug.step_ended,
        _modes.auto.prepare,
        *_host.functions_of_a_step(),
    )
    _host.install_hooks()
    _modes.debug.start()
    _modes.auto.start()
