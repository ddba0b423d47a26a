"""Tracing of a training step that no device runs: one module for each engine that supports it."""
