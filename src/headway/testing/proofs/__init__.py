"""Proofs that checkpoints survive: each breaks saves in many ways and counts what it saw.

Owns: crash points (crashes.py), kills of training (kills.py), damage to files (damage.py) and I/O
errors (errors.py), each a function from a size and a seed to an `Outcome`. Does not own: the
faults themselves (faults.py, powercut.py), nor how large a proof is (tests/faults,
benchmarks/faults.py).
"""
