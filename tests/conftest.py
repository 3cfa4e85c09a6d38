"""Tests run on two CPU devices, so that sharding is exercised everywhere."""

import jax

jax.config.update("jax_num_cpu_devices", 2)
