"""Frameworks: how the leaves of JAX, PyTorch and NumPy states become buffers and come back."""

from waystation.frameworks.numpy_arrays import AbstractNumpy

__all__ = ["AbstractNumpy"]
