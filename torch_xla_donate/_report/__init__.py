"""The outcome of donations: the report, its reasons, and the warnings."""

from torch_xla_donate._report.donors import Donor
from torch_xla_donate._report.notices import is_postponed, later, warn_once, warn_or_raise
from torch_xla_donate._report.pairs import Paired, is_known_site, resolve_pairs, watch_pairs
from torch_xla_donate._report.reasons import CONSTANT, HELD_BY_OTHERS, no_donation, sentence
from torch_xla_donate._report.report import DonationReport, HeldInput, donation_report
from torch_xla_donate._report.reuse import report_reuse
