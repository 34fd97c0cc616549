"""Planner for parallel training: enumerates plans, predicts their time and memory, and ranks them."""
