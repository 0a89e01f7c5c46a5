"""Headway: a training framework for PyTorch language models."""

__version__ = "0.1.0"
