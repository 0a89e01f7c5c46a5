"""The callback that lets a run be steered from outside."""
