"""Tables for a terminal and in files, and pictures of timelines."""
