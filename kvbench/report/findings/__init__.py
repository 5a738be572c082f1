"""What is concluded from a run, as sentences."""
