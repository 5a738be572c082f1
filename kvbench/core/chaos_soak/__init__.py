"""Runs at a fixed rate: the cost of faults, and drift over hours."""
