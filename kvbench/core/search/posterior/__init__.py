"""Posterior of the wanted rate: evidence of each trial, its likelihood, and the resulting density."""
