"""Sections of a report, and their order."""
