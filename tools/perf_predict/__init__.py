"""Predictions held against what others measured: ``make perf-predict``."""
