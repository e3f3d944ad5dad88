"""Every exception kvtier raises, as one tree.

Outcomes are values (a miss, a reject and a throttle never raise); these are faults, and each says
whose fault it is:

    KvtierError
    ├── StartError              the operator's: bad input or a missing resource; exit code 2
    │   ├── ConfigError         one key of the configuration
    │   └── LockHeld            another process holds a lock that is needed
    ├── TierError               a medium's: the disk, the network, a server
    │   ├── TierTimeout         no answer before the deadline
    │   └── TierFull            no room, although the tier tried to make some
    ├── RegistrationRefused     the client's: the daemon will not serve this layout or identity
    └── DaemonUnavailable       nobody's: no daemon, or another one
        ├── DaemonSlow          there is one, and it is too slow to wait for
        └── CallRefused         it does not take this very call
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
    """Anything kvtier raises on purpose."""


class StartError(KvtierError):
    """A process cannot start: ``field`` names what is wrong, ``remedy`` what to do about it."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}; {remedy}")
        self.field = field
        self.problem = problem
        self.remedy = remedy


class ConfigError(StartError):
    """One key of the configuration has a value that cannot be used."""


class LockHeld(StartError):
    """Another process holds a lock that this process needs."""


class TierError(KvtierError):
    """A tier could not do what was asked; the caller treats the blocks as missing."""


class TierTimeout(TierError):
    """A tier gave no answer before the deadline."""


class TierFull(TierError):
    """A tier has no room left and nothing it may evict."""


class RegistrationRefused(KvtierError):
    """The daemon will not serve this client; the message says why and what to change."""


class DaemonUnavailable(KvtierError):
    """No daemon answered in time; the engine recomputes."""


class DaemonSlow(DaemonUnavailable):
    """The daemon did not answer, or let go of a lease, before the engine was done."""


class CallRefused(DaemonUnavailable):
    """The daemon does not take a call, and says which part of it is wrong; others go on."""


def reason_of(error: OSError) -> str:
    """Return what the system says of a fault, in words that fit into a sentence."""
    return (error.strerror or str(error) or type(error).__name__).lower()
