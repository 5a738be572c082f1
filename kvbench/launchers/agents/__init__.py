"""Processes on other hosts: an agent on each, reached over a channel that some launcher makes."""
