"""Marks tensors, and cancels marks."""

from torch_xla_donate._marks.batch import Donation, mark_all, refuse_all
from torch_xla_donate._marks.donate import cancel_donation, donate_buffer, is_donated
from torch_xla_donate._marks.refusals import passed_twice, refusal
from torch_xla_donate._marks.request import DonationRequest, check_options, prepare
from torch_xla_donate._marks.scope import LoopBody, current_body, inside_call
