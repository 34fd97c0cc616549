"""Cost model of sharded products and the tuner of dataflows and slice counts."""
