"""The scenario: its sections, checks and text."""
