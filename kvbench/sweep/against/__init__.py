"""Offering again what others reported, and how far this differs from it."""
