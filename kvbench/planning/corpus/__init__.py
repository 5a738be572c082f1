"""Recorded corpora of sessions: read from files, and told on a terminal."""
