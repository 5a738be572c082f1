"""Runs as pandas tables, for notebooks."""
