"""Kernels for few rows on CPUs: C, compiled at first use for this processor and called through ctypes."""
