"""Who watches a sweep besides the console."""
