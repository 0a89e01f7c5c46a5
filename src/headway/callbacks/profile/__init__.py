"""Callbacks that look into a run in detail: traces, memory."""
