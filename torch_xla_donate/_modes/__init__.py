"""Modes of a thread or the process: automatic donation, checks for NaN, disabled donation."""

from torch_xla_donate._modes.auto import auto_donate, set_auto_donate
from torch_xla_donate._modes.context import ThreadMode, donation_disabled
from torch_xla_donate._modes.debug import check_outputs, debug_nans
from torch_xla_donate._modes.expect import expect_donated
