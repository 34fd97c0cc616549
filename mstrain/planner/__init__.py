"""Searches parallel plans: candidates, cost model, memory model, ranking, tuning cache."""
