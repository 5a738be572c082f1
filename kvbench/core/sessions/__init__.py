"""Sessions: conversations of several turns, where they come from, what of them could be reused."""
