"""Callbacks that measure the model on other data than the run's own evaluation set."""
