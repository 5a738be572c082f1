"""Chooses the next rate of a search, and when a trial can end."""
