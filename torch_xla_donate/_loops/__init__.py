"""torch_xla's loops, with donate_buffer usable inside of their bodies."""
