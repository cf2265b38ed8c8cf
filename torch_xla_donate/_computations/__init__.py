"""Calls HLO modules and JAX functions on XLA tensors."""
