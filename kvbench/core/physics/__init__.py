"""Peaks of hardware, and bytes per token of models."""
