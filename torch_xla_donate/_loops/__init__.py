"""torch_xla's loops. Their bodies may call donate_buffer."""
