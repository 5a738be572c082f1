"""The rows and columns of each table, and the formats that tables are written in."""
