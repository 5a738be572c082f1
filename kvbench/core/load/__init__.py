"""When to send, and what."""
