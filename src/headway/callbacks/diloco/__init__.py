"""Callbacks for training across machines that are far apart."""
