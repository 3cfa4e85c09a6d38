"""What this machine offers."""

import os
import socket
from pathlib import Path


def cores() -> list[int]:
    """CPU cores this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def free_port() -> int:
    """A TCP port that nobody listens at on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def keep_compiled(folder: Path) -> None:
    """Let JAX keep every compiled program in `folder`, for the next start."""
    import jax

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # however quickly it was compiled
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)  # and however small it is
    jax.config.update("jax_compilation_cache_dir", str(folder.resolve() / "compiled"))


def full_precision() -> None:
    """Let matrix products have all digits of float32, as on a CPU, unless the user has chosen otherwise.

    By itself JAX rounds their factors to 11 bits on a GPU.
    """
    import jax

    if jax.config.jax_default_matmul_precision is None:  # type: ignore[attr-defined]
        jax.config.update("jax_default_matmul_precision", "highest")
