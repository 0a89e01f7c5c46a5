"""Trainers: each composes the parts around one strategy."""
