"""Traces of a training step, which no device runs: one module an engine that has one."""
