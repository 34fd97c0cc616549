"""Published training runs: their files, what the cost model says of them, and both side by side."""
