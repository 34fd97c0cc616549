"""Step programs of a cluster, simulated: events on devices and links, and live memory."""
