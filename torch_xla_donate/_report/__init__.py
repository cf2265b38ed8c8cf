"""The outcome of donations: the report, its reasons, and the warnings."""

from torch_xla_donate._report.donors import Donor
from torch_xla_donate._report.notices import (
    postpone_notices,
    postponed,
    print_notices,
    raise_with_notices,
    report_reuse,
    unusable_texts,
    warn_once,
    warn_or_raise,
)
from torch_xla_donate._report.reasons import Reason, no_donation, sentence
from torch_xla_donate._report.report import DonationReport, HeldInput, donation_report, reasons_by_buffer
