"""A run: its configuration, preparation, loop, hooks and resumption."""
