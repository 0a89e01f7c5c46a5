"""Callbacks that measure the run."""
