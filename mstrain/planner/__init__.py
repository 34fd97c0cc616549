"""The one answer to "which plan, and what will it cost": candidates, cost, memory, ranking, cache."""
