"""What is launched where, and how long it may take."""
