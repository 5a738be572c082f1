"""Timing profiles fitted to what engines did."""
