"""The exception that ends a run early."""

from mstrain.job.exit_codes import UNRECOVERABLE


class Stopped(SystemExit):
    """Ends the command with exit code `code` after `reason` is printed. Any process may raise it."""

    def __init__(self, reason: str, code: int = UNRECOVERABLE):
        super().__init__(code)
        self.reason = reason
