"""References reproduced, defects included. Nothing in mstrain imports this but the registry of plan.py."""
