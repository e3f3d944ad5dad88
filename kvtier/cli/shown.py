"""Numbers for people."""

__all__ = ["NO_FULL_BLOCK", "shown_bytes", "shown_count", "shown_seconds"]

NO_FULL_BLOCK = "the prompt fills no block, and only full blocks are kept"


def shown_bytes(num_bytes: float) -> str:
    """Return a size with three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.3g} {unit}" if num_bytes < 999.5 else f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.3g} TiB"


def shown_count(count: float) -> str:
    """Return a whole number with thousands apart."""
    return f"{count:,.0f}"


def shown_seconds(seconds: float) -> str:
    """Return a time in the unit that leaves three digits."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"
