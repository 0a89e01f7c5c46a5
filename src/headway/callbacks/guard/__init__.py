"""Callbacks that keep a run from harm: they stop it, take it back or leave steps out."""
