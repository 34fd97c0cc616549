"""Small clusters with made-up profiles, written in the files the planner reads."""

import json

import numpy as np
import pytest

from tests.research.metis.conftest import inputs  # noqa: F401 - files of the reference

BANDWIDTHS = {"fast": (2.0, 40.0), "slow": (1.0, 20.0)}  # inter, intra GB/s


class SmallCluster:
    """Files of a cluster of (type, slots) hosts; layer times are random per layer."""

    def __init__(self, folder, hosts, num_layers=4, seed=0, memory_gb=1.0, batches=(1, 2, 4, 8)):
        self.hostfile, self.clusterfile = folder / "hostfile", folder / "clusterfile.json"
        self.profiles = folder / "profiles"
        self.profiles.mkdir(exist_ok=True)
        self.hostfile.write_text("".join(f"{kind} slots={slots}\n" for kind, slots in hosts))
        self.clusterfile.write_text(
            json.dumps(
                {
                    kind: {
                        "instance_type": kind,
                        "inter_bandwidth": inter,
                        "intra_bandwidth": intra,
                        "memory": memory_gb,
                    }
                    for kind, (inter, intra) in BANDWIDTHS.items()
                }
            )
        )
        random = np.random.default_rng(seed)
        for kind, slowness in (("fast", 1.0), ("slow", 2.7)):
            layers = slowness * random.uniform(1.0, 3.0, num_layers)
            for tp in (1, 2):
                for batch in batches:
                    self.write(kind, tp, batch, layers * (0.3 + batch) / tp**0.8, slowness)

    def write(self, kind, tp, batch, layer_ms, slowness):
        num_layers = len(layer_ms)
        (self.profiles / f"DeviceType.{kind}_tp{tp}_bs{batch}.json").write_text(
            json.dumps(
                {
                    "model": {
                        "parameters": {"parameters_per_layer_bytes": [30e6] + [20e6] * (num_layers - 2) + [25e6]}
                    },
                    "execution_time": {
                        "layer_compute_total_ms": list(layer_ms),
                        "optimizer_time_ms": 4.0 * slowness / tp,
                        "forward_backward_time_ms": sum(layer_ms) + 0.5 * batch,
                        "batch_generator_time_ms": 0.2 * slowness,
                    },
                    "execution_memory": {"layer_memory_total_mb": [1.0] * num_layers},
                }
            )
        )

    @property
    def files(self):
        return self.hostfile, self.clusterfile, self.profiles


@pytest.fixture
def small_cluster(tmp_path):
    return lambda *args, **kwargs: SmallCluster(tmp_path, *args, **kwargs)
