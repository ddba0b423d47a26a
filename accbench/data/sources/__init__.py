"""Data sources, a module each: `class Source`, see `accbench.data`."""
