"""Tests run on two CPU devices, so that sharding is exercised everywhere, and on the same examples every time."""

import os
import tempfile
from collections.abc import Iterator

# What one process has compiled all others use, also those that tests start. JAX writes such files without a lock: who
# reads one too early is warned, and compiles.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _compiled = tempfile.TemporaryDirectory()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # most of the tests' time is compilation

import jax
import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")
jax.config.update("jax_num_cpu_devices", 2)


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Random numbers that compile fast."""
    with jax.default_prng_impl("unsafe_rbg"):
        yield
