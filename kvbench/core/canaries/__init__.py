"""Canaries: requests of a load with known right answers, to detect wrong ones under load."""
