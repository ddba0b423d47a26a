"""`accbench compare`: its plan, its runs in rounds, and the numerics pass."""
