"""Conclusions from figures."""
