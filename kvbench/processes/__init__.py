"""Processes that kvbench starts: called by argv, a JSON spec and HTTP, never imported from outside."""
