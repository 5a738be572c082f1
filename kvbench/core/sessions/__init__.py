"""Sessions: multi-turn conversations, their sources and reuse."""
