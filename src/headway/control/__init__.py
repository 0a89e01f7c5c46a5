"""Steering a run from outside: the wire's words, the server in rank 0, clients and discovery."""
