"""Simulator of training steps on a cluster: events on devices and links, and live memory over time."""
