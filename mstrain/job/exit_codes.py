"""The exit codes of train.py and what a launcher does with each. Other documents repeat this table.

| Code | Meaning | Launcher |
| --- | --- | --- |
| 0 | Finished: all steps are done and saved. | Done. |
| 1 | Unrecoverable error: a restart fails the same way. | Stop. |
| 2 | Invalid command: the message says what to type instead. | Stop. |
| 75 | Restart: a process, device or network failed, or token files changed. | Restart, a limited number of times. |
| 85 | Stopped and saved after a signal, before the last step. | Restart when devices are available. |
| 128+N | Ended by signal N without a save. | Restart, a limited number of times. |

75 is EX_TEMPFAIL of sysexits.h. 85 lies between the codes of sysexits.h (64 to 78) and the shell's own
(126 and more), and is what HTCondor's documentation uses for the same purpose.
"""

import re

from mstrain.checks import TransientError

FINISHED = 0
UNRECOVERABLE = 1
CONFIGURATION = 2
RESTART = 75
STOPPED = 85
SIGNALED = 128  # plus the signal's number

_RUNTIME = r"([A-Z_]+): "  # The start of JAX's own failures, such as UNKNOWN: Gloo all-reduce failed, a ValueError
# Codes of a JAX failure that the same program on the same devices repeats.
_PERSISTENT = ("INVALID_ARGUMENT", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED", "OUT_OF_RANGE", "PERMISSION_DENIED")


class MissingProcess(TransientError):
    """A process did not arrive in time: its host may be slow or lost."""


def restartable(code: int) -> bool:
    """Whether the same command may succeed after `code`; a negative one is Popen's for a signal."""
    return code in (RESTART, STOPPED) or code >= SIGNALED or code < 0


def code_of(error: BaseException) -> int:
    """The exit code of a process that `error` ends."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FINISHED if error.code is None else UNRECOVERABLE
    if isinstance(error, KeyboardInterrupt):
        return SIGNALED + 2
    if isinstance(error, TransientError):
        return RESTART
    status = re.match(_RUNTIME, str(error))
    if type(error).__name__ == "JaxRuntimeError" or (isinstance(error, ValueError) and status):
        return UNRECOVERABLE if status and status[1] in _PERSISTENT else RESTART
    return CONFIGURATION if isinstance(error, ValueError) else UNRECOVERABLE
