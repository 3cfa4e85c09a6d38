"""Tests run on two CPU devices, so that sharding is exercised everywhere, and on the same examples every time."""

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

# What one process has compiled all others use, also those that tests start. JAX writes such files without a lock: who
# reads one too early is warned, and compiles.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _compiled = tempfile.TemporaryDirectory()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # most of the tests' time is compilation
    # The older emitters compile twice as fast. XLA dies of a flag it does not know, so ask a process first.
    _flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"
    _probe = [sys.executable, "-c", "import jax; jax.devices()"]
    if subprocess.run(_probe, env=os.environ | {"XLA_FLAGS": _flags}, capture_output=True).returncode == 0:
        os.environ["XLA_FLAGS"] = _flags

import jax
import pytest
from hypothesis import settings

_QUICK = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")  # how tests compile, and users do not

settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")
jax.config.update("jax_num_cpu_devices", 2)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked as_compiled_for_users in a process of its own, which compiles as theirs do."""
    if pyfuncitem.get_closest_marker("as_compiled_for_users") is None or not any(name in os.environ for name in _QUICK):
        return None
    env = {name: value for name, value in os.environ.items() if name not in _QUICK} | {"PYTEST_XDIST_WORKER": "alone"}
    call = [sys.executable, "-m", "pytest", "-o", "addopts=-q --strict-markers -p no:xdist", pyfuncitem.nodeid]
    done = subprocess.run(call, env=env, cwd=pyfuncitem.config.rootpath, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return True


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled() -> Iterator[None]:
    """Drop a file's programs when it ends.

    Each has dozens of memory mappings; a process of Linux may have 65,530, and LLVM crashes when it gets no more.
    """
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Random numbers that compile fast."""
    with jax.default_prng_impl("unsafe_rbg"):
        yield
