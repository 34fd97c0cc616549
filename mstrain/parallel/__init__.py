"""Cost models of sharded matrix products and exchanges, the tuner of dataflows and slices, pipeline schedules."""
