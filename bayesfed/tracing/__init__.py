"""Tracing and compilation of functions of tensors."""
