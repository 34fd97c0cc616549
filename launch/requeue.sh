# Sourced by the batch scripts: what follows an exit code of mstrain/job/exit_codes.py.

# Puts the job back into the queue after `code`, when that helps: after 85 (stopped and saved) always, after 75 (restart) or
# a death by a signal MAX_RESTARTS times at most (20).
requeue_after() {
    local code=$1
    if ((code == 75 || code >= 128)); then
        if ((${SLURM_RESTART_COUNT:-0} >= ${MAX_RESTARTS:-20})); then
            echo "requeue.sh: exit code $code after $SLURM_RESTART_COUNT restarts: giving up" >&2
            return
        fi
    elif ((code != 85)); then
        return
    fi
    # A job that scancel ends or that SLURM itself requeues is not RUNNING any more.
    if scontrol show job "$SLURM_JOB_ID" | grep -q 'JobState=RUNNING'; then
        echo "requeue.sh: exit code $code: back into the queue"
        scontrol requeue "$SLURM_JOB_ID"
    fi
}
