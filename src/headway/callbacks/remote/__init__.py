"""Callbacks that tell a service about the run. None of them may stop or slow it."""
