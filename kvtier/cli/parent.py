"""For a process that another one has started for itself alone: it does not outlive that one."""

import ctypes
import os
import signal

__all__ = ["end_with"]

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have the kernel tell this process to stop when its parent has ended, however that was.

    A parent that is gone by now, so that ours is another, counts as well.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
