"""Arrival times and prompts."""
