"""What is wrong with parts of a scenario, by its plain data."""
