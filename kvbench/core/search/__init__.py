"""Which rate next, and when a trial has seen enough."""
