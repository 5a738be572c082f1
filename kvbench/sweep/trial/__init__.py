"""One measured trial: its load, readings, and evidence for the gates."""
