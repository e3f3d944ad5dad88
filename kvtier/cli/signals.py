"""The two meanings of SIGHUP: the terminal has closed, or an operator wants a reload.

Without a controlling terminal (systemd, setsid, most containers), only operators send it. A process
started by nohup ignores SIGHUP and outlives its terminal.
"""

import os
import signal

__all__ = ["block_hangups", "hangup_stops"]


def hangup_stops() -> bool:
    """Return whether SIGHUP means that the terminal has closed, so that it stops this process."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return False
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:  # no controlling terminal
        return False
    return True


def block_hangups() -> None:
    """Block SIGHUP unless it stops this process; it would be fatal until a handler is set."""
    if not hangup_stops():
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
