"""What can be concluded from figures."""
