"""What builds accbench; all that it needs to know stands in pyproject.toml."""

from setuptools import setup

setup()
