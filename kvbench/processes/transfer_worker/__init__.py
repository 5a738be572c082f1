"""The processes that host one side of a transfer, and what starts them and talks to them."""
