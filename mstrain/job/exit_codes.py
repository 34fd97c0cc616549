"""The exit codes of train.py and what a launcher does with each. The one table that all others repeat.

| Code | Meaning | Launcher |
| --- | --- | --- |
| 0 | Finished: every step is made and saved. | Done. |
| 1 | Unrecoverable: a restart fails the same way. | Stop, a person looks. |
| 2 | Configuration: the command is refused, and the message says what to type instead. | Stop, a person corrects. |
| 75 | Restart: another process, a device or the network failed. | Restart, a limited number of times. |
| 85 | Stopped and saved: a signal came before the last step. | Restart when there are devices again. |
| 128+N | Ended by signal N without a save. | Restart, a limited number of times. |

75 is EX_TEMPFAIL of sysexits.h. 85 lies between the codes of sysexits.h (64 to 78) and the shell's own
(126 and more), and is what HTCondor's documentation uses for the same purpose.
"""

import re

FINISHED = 0
UNRECOVERABLE = 1
CONFIGURATION = 2
RESTART = 75
STOPPED = 85
SIGNALED = 128  # plus the signal's number

_RUNTIME = r"([A-Z_]+): "  # begins JAX's own failures, such as UNKNOWN: Gloo all-reduce failed, a ValueError
# Codes of a JAX failure that the same program on the same devices repeats.
_PERSISTENT = ("INVALID_ARGUMENT", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED", "OUT_OF_RANGE", "PERMISSION_DENIED")


class MissingProcess(ValueError):
    """A process did not come in time: its host may be late or lost, so a restart may help."""


def restartable(code: int) -> bool:
    """Whether the same command may succeed after `code`; a negative one is Popen's for a signal."""
    return code in (RESTART, STOPPED) or code >= SIGNALED or code < 0


def code_of(error: BaseException) -> int:
    """The exit code of a process that `error` ends."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FINISHED if error.code is None else UNRECOVERABLE
    if isinstance(error, KeyboardInterrupt):
        return SIGNALED + 2
    if isinstance(error, MissingProcess):
        return RESTART
    status = re.match(_RUNTIME, str(error))
    if type(error).__name__ == "JaxRuntimeError" or (isinstance(error, ValueError) and status):
        return UNRECOVERABLE if status and status[1] in _PERSISTENT else RESTART
    return CONFIGURATION if isinstance(error, ValueError) else UNRECOVERABLE
