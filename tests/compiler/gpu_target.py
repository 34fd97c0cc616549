"""GPUs that are not present, as targets of compilation: XLA's CUDA compiler needs only a description of a GPU."""

import importlib.metadata

import jax
from jax.experimental import topologies

from mstrain.compiler.topology import quiet
from mstrain.hardware import Chip

# An SM of compute capability 9.0, H100 and H200 (NVIDIA H100 Tensor Core GPU Architecture; CUDA C++ Programming Guide,
# table of compute capabilities). The versions are those of the packages of jax[cuda12].
HOPPER = """
gpu_device_info {{
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  memory_bandwidth: {bandwidth}
  device_memory_size: {memory}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{kind}"
"""


def missing_compiler() -> str | None:
    """Why this installation cannot compile for a GPU and what to type, or None if it can."""
    fix = f'Compiling for a GPU needs its compiler. Type: pip install "jax[cuda12]=={jax.__version__}"'
    for package in ("jax-cuda12-pjrt", "jax-cuda12-plugin", "nvidia-cudnn-cu12"):  # JAX asks for the version of cuDNN
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"The package {package} is not installed. {fix}"
    return None


def absent_gpu(chip: Chip):
    """One H100 or H200 that is not present. Raises ValueError, with the fix, if the compiler is not installed."""
    if problem := missing_compiler():
        raise ValueError(problem)
    if chip.name not in ("h100", "h200"):
        raise ValueError(f"GPU {chip.name} is unknown. Type h100 or h200.")
    if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]  JAX's stub lacks its flags
        jax.config.update("jax_platforms", "cpu")  # the host of the compilation needs no accelerator
    numbers = {"bandwidth": int(chip.number("hbm_bandwidth")), "memory": int(chip.number("hbm_bytes"))}
    config = HOPPER.format(kind=chip.device_kinds[0], **numbers)
    with quiet():
        topology = topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x1")
    return topology.devices[0]
