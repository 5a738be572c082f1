"""Validity checks of a trial: evidence in, findings out."""
