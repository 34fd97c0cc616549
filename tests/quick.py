"""XLA's options for tests: compiling is most of a test's time, and these save two thirds of it.

They change nothing that a test is about: neither the partitioned program nor the precision of its products.
"""

from importlib.metadata import version

QUICK: dict[str, int | bool] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
if tuple(map(int, version("jaxlib").split(".")[:3])) <= (0, 11, 0):  # later ones end at flags that they do not know
    QUICK["xla_cpu_use_fusion_emitters"] = False

FUSED = {"xla_cpu_use_fusion_emitters": True} if "xla_cpu_use_fusion_emitters" in QUICK else {}
"""For programs whose bits are compared on several shapes: with fusion emitters, no bit depends on the shape."""

QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())
"""The same for XLA_FLAGS, of this process before JAX makes its backends, or of processes that tests start."""
