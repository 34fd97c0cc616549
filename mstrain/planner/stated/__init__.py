"""What a stated training step costs: any degrees, shards, schedules and recomputation, whatever train.py can run."""
