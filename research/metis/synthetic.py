"""Synthetic profiles, extrapolated from nine measured samples of one device type as the reference does.

The samples are profiles for tp and batch in {1, 2, 4}. Layers are repeated; twice the batch takes twice the compute
time, twice the tp degree half of it; the times of a second, slower device type are longer by a factor.
"""

import copy
from pathlib import Path

from mstrain.hardware.layer_profiles import profile_name, sequential_sum
from mstrain.json_files import read_json, write_json

SAMPLES = Path(__file__).with_name("samples")  # ten layers of GPT-3 on A100, from the profiles that Metis publishes
SAMPLE_DEGREES = (1, 2, 4)
BETWEEN = "between_layers_ms"
TOTAL_PARTS = (
    "forward_backward_time_ms",
    "batch_generator_time_ms",
    "layernorm_grads_all_reduce_time_ms",
    "embedding_grads_all_reduce_time_ms",
    "optimizer_time_ms",
)
COMPUTE_PARTS = ("layer_compute_total_ms", "forward_backward_time_ms", BETWEEN)


def write_hostfile(path: str | Path, devices_per_type: int) -> None:
    """The synthetic host file of the reference: devices_per_type // 4 hosts of V100, then as many of A100."""
    hosts = devices_per_type // 4
    if hosts < 1:
        raise ValueError(f"devices_per_type={devices_per_type}: hosts have 4 devices; give 4 or more")
    Path(path).write_text("0.0.0.1 slots=4\n" * hosts + "0.0.0.4 slots=4\n" * hosts)


def read_samples(folder: str | Path) -> dict[tuple[int, int], dict]:
    """The nine sample documents by (tp, batch)."""
    samples = {}
    for tp in SAMPLE_DEGREES:
        for batch in SAMPLE_DEGREES:
            path = Path(folder) / profile_name(("A100", tp, batch))
            if not path.is_file():
                raise ValueError(f"{path}: no such sample; the generator needs tp and bs in {SAMPLE_DEGREES}")
            samples[tp, batch] = read_json(path, "sample")
    return samples


def write_profiles(
    folder: str | Path, samples: dict[tuple[int, int], dict], num_layers: int, max_batch: int, slowdown: float = 3.5
) -> int:
    """Writes profiles of A100 and V100 for tp and batch 1, 2, 4 ... max_batch; returns the number of files.

    Profiles that are in the folder are removed; other files are kept.
    """
    if num_layers < 3:
        raise ValueError(f"num_layers={num_layers}: embedding, output and a layer between need 3 or more")
    if max_batch < 4 or max_batch & (max_batch - 1):
        raise ValueError(f"max_batch={max_batch}: give a power of two, 4 or more")
    grown = grow({key: scale_layers(sample, num_layers) for key, sample in samples.items()}, max_batch)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("DeviceType.*.json"):
        old.unlink()
    for (tp, batch), document in grown.items():
        slow = _rescaled(document, list(document["execution_time"]), slowdown)
        for device_type, written in (("A100", document), ("V100", slow)):
            write_json(written, folder / profile_name((device_type, tp, batch)))
    return 2 * len(grown)


def scale_layers(sample: dict, num_layers: int) -> dict:
    """The sample with its second layer repeated until there are `num_layers` of them."""
    document = copy.deepcopy(sample)
    times, memory = document["execution_time"], document["execution_memory"]
    parameters = document["model"]["parameters"]
    times[BETWEEN] = times["forward_backward_time_ms"] - sequential_sum(times["layer_compute_total_ms"])
    for table, name in (
        (parameters, "parameters_per_layer_bytes"),
        (memory, "layer_memory_total_mb"),
        (times, "layer_compute_total_ms"),
    ):
        table[name] = [table[name][0]] + [table[name][1]] * (num_layers - 2) + [table[name][-1]]
    parameters["total_parameters_bytes"] = sum(parameters["parameters_per_layer_bytes"])
    memory["total_memory"] = sequential_sum(memory["layer_memory_total_mb"])
    times["forward_backward_time_ms"] = times[BETWEEN] + sequential_sum(times["layer_compute_total_ms"])
    for name in ("layernorm_grads_all_reduce_time_ms", "optimizer_time_ms"):
        times[name] = times[name] / 10 * num_layers
    document["model"].update(num_layers=num_layers, num_MHA_layers=num_layers - 2)
    return _rescaled(document, (), 1.0)


def grow(samples: dict[tuple[int, int], dict], max_batch: int) -> dict[tuple[int, int], dict]:
    """Profiles for all (tp, batch) up to max_batch: compute time is proportional to batch and to 1 / tp."""
    grown, last = dict(samples), SAMPLE_DEGREES[-1]
    larger = [last << power for power in range((max_batch // last).bit_length() - 1)]
    for tp in SAMPLE_DEGREES:
        for batch in larger:
            grown[tp, 2 * batch] = _rescaled(grown[tp, batch], COMPUTE_PARTS, 2.0)
    for batch in sorted({batch for _, batch in grown}):
        for tp in larger:
            grown[2 * tp, batch] = _rescaled(grown[tp, batch], COMPUTE_PARTS, 0.5)
    return grown


def _rescaled(document: dict, names, factor: float) -> dict:
    """A copy with the times `names` multiplied by `factor`, and with the new total."""
    document = copy.deepcopy(document)
    times = document["execution_time"]
    for name in names:
        value = times[name]
        times[name] = [factor * part for part in value] if isinstance(value, list) else factor * value
    times["total_time_ms"] = sequential_sum([times[name] for name in TOTAL_PARTS])
    return document
