"""The processes that host one side of a transfer, and their clients."""
