"""All exceptions of kvtier, as one tree.

Outcomes are values: a miss, reject or throttle never raises. Exceptions are faults, and the type
says whose:

    KvtierError
    ├── StartError              the operator's: bad input or a missing resource; exit code 2
    │   ├── ConfigError         an invalid configuration value
    │   └── LockHeld            another process holds a required lock
    ├── TierError               a storage device's: the disk, the network, a server
    │   ├── TierTimeout         no answer before the deadline
    │   └── TierFull            out of space although the tier tried to evict
    ├── RegistrationRefused     the client's: the daemon does not support its layout or identity
    └── DaemonUnavailable       nobody's: the daemon is missing or was replaced
        ├── DaemonSlow          the daemon is too slow to wait for
        └── CallRefused         the daemon refuses this call
"""

__all__ = [
    "CallRefused",
    "ConfigError",
    "DaemonSlow",
    "DaemonUnavailable",
    "KvtierError",
    "LockHeld",
    "RegistrationRefused",
    "StartError",
    "TierError",
    "TierFull",
    "TierTimeout",
    "reason_of",
]


class KvtierError(Exception):
    """Base class of all exceptions that kvtier raises on purpose."""


class StartError(KvtierError):
    """A process cannot start: ``problem`` with ``field``, and ``remedy`` to fix it."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}; {remedy}")
        self.field = field
        self.problem = problem
        self.remedy = remedy


class ConfigError(StartError):
    """A key of the configuration has an invalid value."""


class LockHeld(StartError):
    """Another process holds a lock that this process needs."""


class TierError(KvtierError):
    """A tier operation failed; the caller treats the blocks as missing."""


class TierTimeout(TierError):
    """A tier did not answer before the deadline."""


class TierFull(TierError):
    """A tier has no free space and cannot evict any block."""


class RegistrationRefused(KvtierError):
    """The daemon refuses to serve this client; the message says why and what to change."""


class DaemonUnavailable(KvtierError):
    """No daemon answered in time; the engine recomputes."""


class DaemonSlow(DaemonUnavailable):
    """The daemon did not answer, or ended a lease, before the engine was done."""


class CallRefused(DaemonUnavailable):
    """The daemon refused a call and named the invalid field; other calls still work."""


def reason_of(error: OSError) -> str:
    """Return the system's message for an error, for use within a sentence."""
    return (error.strerror or str(error) or type(error).__name__).lower()
