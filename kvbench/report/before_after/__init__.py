"""Runs before and runs after: what was set otherwise, and what became of each highest rate."""
