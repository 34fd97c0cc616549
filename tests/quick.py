"""XLA's options for tests: compiling is most of a test's time, and these save two thirds of it.

They change nothing that a test is about: neither the partitioned program nor the precision of its products.
"""

from mstrain.hardware.chips import quick_options

QUICK = quick_options() | {"xla_cpu_parallel_codegen_split_count": 1}  # one thread compiles a program

FUSED = {"xla_cpu_use_fusion_emitters": True} if "xla_cpu_use_fusion_emitters" in QUICK else {}
"""For programs whose bits are compared on several shapes: with fusion emitters, no bit depends on the shape."""

QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())
"""The same for XLA_FLAGS, of this process before JAX makes its backends, or of processes that tests start."""
