"""Canaries: requests of a load whose right answers are known, so that wrong ones under load are seen."""
