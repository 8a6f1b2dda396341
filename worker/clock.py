"""The clock that leases are kept by."""

import time


def boot_clock() -> float:
    """Seconds since boot, time asleep included: a lease must not stop running out while the host sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
