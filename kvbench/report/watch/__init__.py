"""A run while it goes on: in the terminal and as a page that follows it."""
