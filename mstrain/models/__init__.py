"""The zoo: one transformer, its families as small differences, and the plan of its products."""
