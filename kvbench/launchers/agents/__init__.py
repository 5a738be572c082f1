"""Processes on other hosts: one agent per host, reached over a launcher's channel."""
