"""Shared parts of several engines."""
