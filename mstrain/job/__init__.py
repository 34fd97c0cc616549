"""The processes of a run: rendezvous, messages, barriers, locks, preemption."""
