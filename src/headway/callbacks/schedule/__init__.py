"""Callbacks that change the size or the subject of a step as the run goes on."""
