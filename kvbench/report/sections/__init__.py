"""What a report says: its sections, and the one place that has their order."""
