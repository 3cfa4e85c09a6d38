"""What this machine offers."""

import os
from pathlib import Path

KEEP_COMPILED = {  # however quickly it was compiled and however small it is
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def cores() -> list[int]:
    """CPU cores this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def keep_compiled(folder: Path) -> None:
    """Let JAX keep every compiled program in `folder`, for the next start."""
    import jax

    for name, value in KEEP_COMPILED.items():
        jax.config.update(name, value)
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))


def full_precision() -> None:
    """Let matrix products have all digits of float32, as on a CPU, unless the user has chosen otherwise.

    By itself JAX rounds their factors to 11 bits on a GPU.
    """
    import jax

    if jax.config.jax_default_matmul_precision is None:  # type: ignore[attr-defined]
        jax.config.update("jax_default_matmul_precision", "highest")
