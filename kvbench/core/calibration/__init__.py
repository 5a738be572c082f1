"""Coefficients of the engine's model, fitted to what was measured, and how far they can be believed."""
