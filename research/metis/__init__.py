"""Metis, compatible with the reference: counts, costs and best plans, defects included."""
