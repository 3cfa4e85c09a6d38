"""What this machine offers."""

import os


def cores() -> list[int]:
    """CPU cores this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
