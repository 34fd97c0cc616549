"""Reproductions of published planners and simulators, including their defects.

In mstrain, only the registry of modes of plan.py refers to this package.
"""
