"""Published training runs: reads their files, predicts them and compares."""
