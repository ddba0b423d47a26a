"""What a comparison's fork server imports, once for all launchers: for nobody else."""

from accbench.uncollected import uncollected

with uncollected():
    import accbench.comparing.numerics
    import accbench.comparing.run
    import accbench.launchers.local  # noqa: F401
