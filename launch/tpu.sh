#!/usr/bin/env bash
# Starts the same command on every worker of a TPU slice, after prepare_tpu_vm.sh has run there, and again when it was
# preempted or failed:
#
#   bash launch/tpu.sh NAME ZONE model=gpt3_1_3b mesh=8x4 run_dir=/mnt/shared/runs/one
#
# run_dir must be a folder that every worker sees (Filestore, or a bucket mounted by gcsfuse). The workers find each other
# through the TPU's metadata. A preempted slice gets SIGTERM, saves and ends. When this script ends or loses its connection,
# the workers get SIGHUP, save and end: run it in tmux. The exit codes are those of mstrain/job/exit_codes.py: after 85 the
# command is started again as soon as the slice is READY, within WAIT_MINUTES (60); after 75 or a lost connection, too, but
# MAX_RESTARTS (20) times in a row at most, also while a trainer that lost its connection is still saving and a new one is
# refused. Any other code ends the script.
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
command="cd mstrain && TERM=dumb .venv/bin/python train.py$(printf ' %q' "$@"); code=\$?; "
command+='echo mstrain-exit-code=$code; exit $code'
# Only with a terminal (-tt) does a lost connection become a SIGHUP there.
line=(gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --ssh-flag=-tt --command="$command")
if $dry_run; then
    printf '%q ' "${line[@]}"
    echo
    exit 0
fi

codes=$(mktemp)
trap 'rm -f "$codes"' EXIT

# Runs the command once and sets `code`: the workers' exit code, or gcloud's where they report none.
start() {
    local wanted
    : >"$codes"
    set +e
    "${line[@]}" </dev/null | awk -v codes="$codes" '
        match($0, /mstrain-exit-code=[0-9]+/) { print substr($0, RSTART + 18, RLENGTH - 18) >codes; next }
        { print; fflush() }'
    code=${PIPESTATUS[0]}
    set -e
    for wanted in 2 1 85 75; do
        if grep -qx "$wanted" "$codes"; then
            code=$wanted
            return
        fi
    done
}

wait_until_ready() {
    local state minute
    for ((minute = 0; minute <= ${WAIT_MINUTES:-60}; minute++)); do
        state=$(gcloud compute tpus tpu-vm describe "$name" --zone="$zone" --format='value(state)') || state=unknown
        if [[ $state == READY ]]; then
            return
        fi
        echo "tpu.sh: $name is $state: waiting for READY"
        sleep 60
    done
    echo "tpu.sh: $name is $state. Create it again, run prepare_tpu_vm.sh and type the same line." >&2
    exit "$code"
}

failures=0 lost=false
while true; do
    started=$SECONDS
    start
    case $code in
        255) lost=true ;;  # ssh's own: the trainer may still be saving there
        2) ;;
        *) lost=false ;;
    esac
    if ((SECONDS - started >= ${LONG_SECONDS:-3600})); then
        failures=0
    fi
    if ((code == 75 || code >= 128)) || { ((code == 2)) && $lost; }; then
        failures=$((failures + 1))
    elif ((code == 85)); then
        failures=0
    else
        exit "$code"
    fi
    if ((failures > ${MAX_RESTARTS:-20})); then
        echo "tpu.sh: exit code $code after ${MAX_RESTARTS:-20} restarts in a row: giving up" >&2
        exit "$code"
    fi
    if $lost; then
        sleep 60
    fi
    wait_until_ready
    echo "tpu.sh: exit code $code: starting again"
done
