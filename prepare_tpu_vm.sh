#!/usr/bin/env bash
# Prepares this worker of a TPU VM: virtual environment .venv, packages, and a look at the TPU. Run it on
# every worker at once, as the workers of a slice wait for each other:
#
#   gcloud compute tpus tpu-vm ssh NAME --worker=all --command='cd mstrain && bash prepare_tpu_vm.sh'
#
# --dry-run prints the steps without taking them. Running it again repairs or updates what is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# What JAX sees from this worker. Prints the reason and fails when that is not a TPU.
check='
import sys

import jax

try:
    try:
        jax.distributed.initialize(initialization_timeout=120)  # they meet by the metadata of the VM
    except ValueError:
        print("no other workers to join: this does not look like a worker of a TPU slice")
    devices = jax.devices()
except RuntimeError as error:
    sys.exit(str(error))
kinds = ", ".join(sorted({device.device_kind for device in devices}))
print(f"process {jax.process_index()} of {jax.process_count()}, devices seen: {len(devices)} {kinds}, "
      f"{jax.local_device_count()} of them here (jax {jax.__version__})", flush=True)
if devices[0].platform != "tpu":
    sys.exit(f"JAX sees {devices[0].platform} devices and no TPU")
'

fail() {
    echo "prepare_tpu_vm: $*" >&2
    exit 1
}

step() {
    echo "+ $1"
    shift
    if ! $dry_run; then "$@"; fi
}

find_python() {
    local name
    for name in python3.12 python3.11 python3; do
        if "$name" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    return 1
}

install() {
    .venv/bin/python -m pip install --quiet --upgrade -r requirements-tpu.txt ||
        fail "pip could not install requirements-tpu.txt; its message is above." \
            "Check the network and the free disk space."
}

look() {
    JAX_PLATFORMS=tpu .venv/bin/python -c "$check" || fail "the TPU is not usable; the reason is above." \
        "If this is one worker of several, run on all of them (--worker=all)." \
        "If a process holds the TPU, end it (sudo lsof /dev/accel* /dev/vfio/*)." \
        "If this machine has no TPU, create one with: gcloud compute tpus tpu-vm create"
}

dry_run=false
case "${1-}" in
    "") ;;
    --dry-run) dry_run=true ;;
    *) fail "unknown option $1. Type: bash prepare_tpu_vm.sh [--dry-run]" ;;
esac

python=$(find_python) || fail "Python 3.11 or 3.12 is needed and neither is here. Type:" \
    "sudo apt-get update && sudo apt-get install -y python3.11 python3.11-venv" \
    "(or create the TPU VM with a newer --version=, such as tpu-ubuntu2204-base or v2-alpha-tpuv5)."
step "$python -m venv .venv" "$python" -m venv .venv ||
    fail "$python cannot make a virtual environment. Type: sudo apt-get install -y $python-venv"
step ".venv/bin/python -m pip install --quiet --upgrade -r requirements-tpu.txt" install
step "JAX_PLATFORMS=tpu .venv/bin/python: join the other workers and count the devices" look
if $dry_run; then
    echo "dry run: nothing was changed"
else
    echo "ready: .venv/bin/python train.py mesh=auto on every worker"
fi
