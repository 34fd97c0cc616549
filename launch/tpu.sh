#!/usr/bin/env bash
# Starts the same command on every worker of a TPU slice, after prepare_tpu_vm.sh has run there:
#
#   bash launch/tpu.sh NAME ZONE model=gpt3_1_3b mesh=8x4 run_dir=/mnt/shared/runs/one
#
# run_dir must be a folder that every worker sees (Filestore, or a bucket mounted by gcsfuse). The workers find each other
# through the TPU's metadata. A preempted slice gets SIGTERM, saves and ends; type the same line when it is back.
# --dry-run as the first word prints the line instead.
set -euo pipefail

dry_run=false
if [[ "${1-}" == --dry-run ]]; then
    dry_run=true
    shift
fi
if (($# < 2)); then
    echo "tpu.sh: Type: bash launch/tpu.sh [--dry-run] NAME ZONE [key=value ...]" >&2
    exit 2
fi
name=$1 zone=$2
shift 2
command="cd mstrain && .venv/bin/python train.py$(printf ' %q' "$@")"
line=(gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$command")
if $dry_run; then
    printf '%q ' "${line[@]}"
    echo
else
    exec "${line[@]}"
fi
