"""The optimal planner for mixed clusters: an exact search of a defined space of plans, with a certificate."""
