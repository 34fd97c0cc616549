"""The planners of Metis (SamsungLabs/Metis) reproduced: same counts, costs and best plans, including their defects."""
