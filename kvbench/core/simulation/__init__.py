"""Engines and deployments in virtual time."""
