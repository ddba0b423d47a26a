"""`accbench compare`: a plan, its runs in turn, and the pass that looks at the numbers."""
