"""What several engines share; no engine of its own."""
