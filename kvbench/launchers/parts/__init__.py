"""Shared parts of the launchers: channels, guards, ports."""
