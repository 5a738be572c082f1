"""Rows and columns of each table, and their output formats."""
