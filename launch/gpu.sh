#!/usr/bin/env bash
# Times training steps of every algorithm and kind of plan on the 8 GPUs of one machine, and packs the tables.
#
#   bash launch/gpu.sh                                        # GPT-3 1.3B with 2,048 tokens
#   bash launch/gpu.sh models=tiny seq=32 repeats=1           # a check on emulated CPU devices
#
# Arguments are keys of benchmark.py for all tables. runs/gpu.tar.gz has the tables, versions and devices. Every table
# ends after four minutes, with the rows that are finished by then.
set -uo pipefail
[ $# -gt 0 ] || set -- models=gpt3_1_3b seq=2048
rm -rf runs/gpu && mkdir -p runs/gpu
{ nvidia-smi; nvidia-smi topo -m; python -m pip freeze | grep -i -E "jax|nvidia|flax|optax"; } > runs/gpu/machine.txt 2>&1

table() {
    local name=$1
    shift
    timeout 240 python benchmark.py bench=step "$@" run_dir="runs/gpu/$name" 2>&1 | tee "runs/gpu/$name.txt" || true
}

table algorithms "$@" meshes="2x4 1x8 8x1"
table sharded "$@" meshes="2x2x2 8x1x1" shard=parameters algorithms="meshslice collective cannon megatron fsdp"
table context "$@" meshes="context2-row2-col2" algorithms="meshslice fsdp"
table pipelined "$@" meshes="stage2-row2-col2 data2-stage4-row1-col1" accumulate=4 algorithms="meshslice megatron"
tar -czf runs/gpu.tar.gz -C runs gpu && echo "Written: runs/gpu.tar.gz"
