"""bench=peers: the training step of mstrain on one device compared with the steps of other software, each in a process
of its own.

Every peer trains the same sizes on one batch of random tokens: bf16 products (float32 on a CPU), float32 parameters
and moments, gradients clipped by their norm, AdamW with weight decay on matrices.
"""
