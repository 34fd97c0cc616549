"""Searches for parallel plans and the simulator that costs them."""
