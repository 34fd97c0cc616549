"""The processes of a run: rendezvous, messages, barriers, preemption."""
