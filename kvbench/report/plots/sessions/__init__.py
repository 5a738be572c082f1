"""Pictures of sessions."""
