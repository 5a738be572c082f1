"""Coefficients of the engine model, fitted to measurements, and their validity."""
