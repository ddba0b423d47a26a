"""The engines as parameters of tests, each skipped where what it needs is not installed."""

import importlib.util
import shutil

import pytest

HAS_COMPILER, HAS_JAX, HAS_XLA = (
    shutil.which("g++") is not None,
    importlib.util.find_spec("jax") is not None,
    importlib.util.find_spec("torch_xla") is not None,
)
NEEDS_COMPILER = pytest.mark.skipif(not HAS_COMPILER, reason="inductor needs g++")
NEEDS_JAX = pytest.mark.skipif(not HAS_JAX, reason="jax is not installed")
NEEDS_XLA = pytest.mark.skipif(not HAS_XLA, reason="torch_xla is not installed")

INDUCTOR = pytest.param("inductor", marks=NEEDS_COMPILER)
JAX = pytest.param("jax", marks=NEEDS_JAX)
XLA = pytest.param("xla", marks=[pytest.mark.xla, NEEDS_XLA])
COMPILED = (INDUCTOR, JAX, XLA)
ALL = ("ddp", *COMPILED)
