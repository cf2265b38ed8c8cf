"""Computations called on XLA tensors: HLO modules and JAX functions."""
