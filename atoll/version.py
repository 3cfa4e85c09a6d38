"""The version of Atoll, apart from everything else so that packaging can read it without importing JAX."""

__version__ = "0.1.0"
