"""Published training runs: reads a file of runs, predicts them, and compares with the measurements."""
