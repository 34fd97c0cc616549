# Sourced by the batch scripts. Handles the exit codes of mstrain/job/exit_codes.py.

# Puts the job back into the queue after `code`, when that helps: after 85 (stopped and saved) always; after 75 (restart) or
# a death by a signal, unless that was failure number MAX_RESTARTS + 1 in a row (20). A job that ran for an hour
# (LONG_SECONDS) before it failed resets the count.
requeue_after() {
    local code=$1 file=mstrain-${SLURM_JOB_ID:-}.failures failures=0
    if [[ -z ${SLURM_JOB_ID:-} ]]; then  # not a batch job
        return
    fi
    if ((code == 75 || code >= 128)); then
        if ((SECONDS < ${LONG_SECONDS:-3600})) && [[ -r $file ]]; then
            failures=$(<"$file")
        fi
        if ((failures >= ${MAX_RESTARTS:-20})); then
            echo "requeue.sh: exit code $code after $failures restarts in a row: giving up" >&2
            return
        fi
        echo $((failures + 1)) >"$file"
    else
        rm -f "$file"
        if ((code != 85)); then
            return
        fi
    fi
    # A job that scancel ends or that SLURM itself requeues is not RUNNING any more.
    if scontrol show job "$SLURM_JOB_ID" | grep -q 'JobState=RUNNING'; then
        echo "requeue.sh: exit code $code: back into the queue"
        scontrol requeue "$SLURM_JOB_ID"
    fi
}
