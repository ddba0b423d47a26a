"""Data sources, one module each, with a `class Source`; see `accbench.data`."""
