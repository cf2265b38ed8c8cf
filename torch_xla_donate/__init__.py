"""Buffer donation for PyTorch/XLA: mark tensors with `donate_buffer`, and the next step may reuse their memory."""

from torch_xla_donate import _host

_C = _host.load()

from torch_xla_donate import _auto, _debug, _errors, _reuse
from torch_xla_donate import hlo as hlo
from torch_xla_donate._auto import auto_donate as auto_donate
from torch_xla_donate._call_jax import call_jax as call_jax
from torch_xla_donate._compile import compile as compile
from torch_xla_donate._debug import debug_nans as debug_nans
from torch_xla_donate._donate import cancel_donation as cancel_donation
from torch_xla_donate._donate import donate_buffer as donate_buffer
from torch_xla_donate._donate import donation_disabled as donation_disabled
from torch_xla_donate._donate import is_donated as is_donated
from torch_xla_donate._errors import DonatedBufferError as DonatedBufferError
from torch_xla_donate._errors import DonationError as DonationError
from torch_xla_donate._errors import DonationWarning as DonationWarning
from torch_xla_donate._gradient_accumulation import gradient_accumulation as gradient_accumulation
from torch_xla_donate._report import DonationReport as DonationReport
from torch_xla_donate._report import Donor as Donor
from torch_xla_donate._report import HeldInput as HeldInput
from torch_xla_donate._report import donation_report as donation_report
from torch_xla_donate._scan import scan as scan
from torch_xla_donate._scan import scan_layers as scan_layers
from torch_xla_donate._user_computation import user_computation as user_computation

__version__ = "0.1.0"

__all__ = [
    "DonatedBufferError",
    "DonationError",
    "DonationReport",
    "DonationWarning",
    "Donor",
    "HeldInput",
    "auto_donate",
    "call_jax",
    "cancel_donation",
    "compile",
    "debug_nans",
    "donate_buffer",
    "donation_disabled",
    "donation_report",
    "gradient_accumulation",
    "hlo",
    "is_donated",
    "scan",
    "scan_layers",
    "user_computation",
]

_C.set_callbacks(
    DonatedBufferError,
    _errors.describe_use,
    _reuse.report,
    _debug.step_ended,
    _auto.prepare,
    *_host.functions_of_a_step(),
)
_host.install_hooks()
_debug.start()
_auto.start()
