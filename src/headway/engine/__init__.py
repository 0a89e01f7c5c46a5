"""The training loop and what it is made of: events, state, metrics, triggers, evaluation."""
