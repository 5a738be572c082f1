"""Figures of a trial from request records."""
