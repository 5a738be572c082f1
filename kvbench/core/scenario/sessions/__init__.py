"""The part of a scenario that asks for sessions."""
