"""Conclusions from a run, as sentences."""
