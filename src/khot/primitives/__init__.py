"""Numerics in plain PyTorch: the reference that every kernel is held to."""
