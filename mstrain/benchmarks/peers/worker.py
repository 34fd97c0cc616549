"""The process of one peer: python -m mstrain.benchmarks.peers.worker TASK, as JSON. Its last line is the outcome. With
`device` instead of a task it is kind and platform of JAX's first device.

A process of its own, because JAX and PyTorch each take the device's memory and keep it.
"""

import importlib
import json
import sys

import jax

from mstrain.benchmarks.peers.task import Task, run

MODULES = {  # with `make(task) -> Peer`
    "mstrain": "mstrain.benchmarks.peers.own",
    "flax": "mstrain.benchmarks.peers.flax_model",
    "torch": "mstrain.benchmarks.peers.torch_step",
    "transformers": "mstrain.benchmarks.peers.torch_step",
}


def main(text: str) -> None:
    if text == "device":
        first = jax.devices()[0]
        print(json.dumps((first.device_kind, first.platform)))
        return
    task = Task.from_json(text)
    outcome = run(importlib.import_module(MODULES[task.peer]).make(task), task)
    print(outcome.to_json())


if __name__ == "__main__":
    main(sys.argv[1])
