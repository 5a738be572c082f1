"""One measured trial: its load, what is read around it, and the evidence for the gates."""
