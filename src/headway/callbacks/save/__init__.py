"""Callbacks that save: checkpoints, averages, model folders."""
