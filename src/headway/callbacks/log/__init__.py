"""Callbacks that show and record the run."""
