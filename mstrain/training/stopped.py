"""How a run ends before its last step."""


class Stopped(SystemExit):
    """Ends the command with `code` after `reason` was printed; raise it on every process or on one."""

    def __init__(self, reason: str, code: int = 1):
        super().__init__(code)
        self.reason = reason
