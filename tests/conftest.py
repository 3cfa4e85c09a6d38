"""Tests run on two CPU devices, so that sharding is exercised everywhere, and on the same examples every time."""

import jax
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")
jax.config.update("jax_num_cpu_devices", 2)
