"""The optimal planner: complete plans only, exact over a stated space, with a certificate."""
