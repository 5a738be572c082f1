"""Processes of their own: met over argv, a JSON spec and HTTP, never imported from outside."""
