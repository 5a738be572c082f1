"""KV transfers: cases, blocks, rows, the fitted formula."""
