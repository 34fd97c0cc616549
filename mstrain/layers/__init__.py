"""Flax Linen layers: dense, attention, MLP, norm, embedding, loss."""
