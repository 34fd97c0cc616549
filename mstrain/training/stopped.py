"""How a run ends before its last step."""

from mstrain.job.exit_codes import UNRECOVERABLE


class Stopped(SystemExit):
    """Ends the command with `code` after `reason` was printed; raise it on every process or on one."""

    def __init__(self, reason: str, code: int = UNRECOVERABLE):
        super().__init__(code)
        self.reason = reason
