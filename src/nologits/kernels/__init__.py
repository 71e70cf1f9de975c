"""Triton kernels and their launchers. Imported lazily: the rest of the library works without Triton."""
