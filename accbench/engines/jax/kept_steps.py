"""Steps as JAX has them before they are compiled, kept on disk: capturing them takes seconds.

A file a step, in JAX's own format for exported functions (jax.export, which is no pickle), under
a name that follows from all that the step does.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import torch

import accbench
from accbench.engines.jax.lowering import table, torch_calls

_CHECKSUM_BYTES = 32
# Of JAX's own calls it is sure that another process has them; of ours we are.
_CALLS = (jax.export.DisabledSafetyCheck.custom_call(torch_calls.TARGET),)
# Steps in the folder, about a megabyte each; the least lately used go.
_MOST = 100


class KeptSteps:
    """A folder of them.

    Args:
        folder: made where it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str, arguments: tuple[Any, ...], build: Callable[[], Any]) -> Any:
        """A jitted step that reuses its first two arguments.

        Args:
            key: `key_of` the step.
            arguments: that it will be called with.
            build: gives the step, jitted, where it was not kept.
        """
        path = self.folder / f"{key}.jaxexport"
        with contextlib.suppress(Exception):  # damaged, or of another JAX
            kept = path.read_bytes()
            checksum, content = kept[:_CHECKSUM_BYTES], kept[_CHECKSUM_BYTES:]
            if hashlib.sha256(content).digest() == checksum:
                path.touch()
                return _jitted(jax.export.deserialize(bytearray(content)))
        function = build()
        try:
            exported = jax.export.export(function, disabled_checks=_CALLS)(*arguments)
            content = bytes(exported.serialize())
        except Exception:  # it has operations that JAX keeps for no other process
            return function
        with contextlib.suppress(OSError):  # a full disk: it is made again next time
            self._keep(path, hashlib.sha256(content).digest() + content)
        # As it will be from the file, or the compiler's own cache would not have it then.
        return _jitted(jax.export.deserialize(bytearray(content)))

    def _keep(self, path: Path, content: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            try:
                file.write(content)
                file.close()
                Path(file.name).replace(path)
            finally:
                Path(file.name).unlink(missing_ok=True)  # if it has not become the step's
        by_age = sorted(self.folder.glob("*.jaxexport"), key=lambda p: p.stat().st_mtime)
        for old in by_age[:-_MOST]:
            old.unlink(missing_ok=True)


def _jitted(exported: Any) -> Any:
    return jax.jit(exported.call, donate_argnums=(0, 1))


def key_of(*facts: Any, arguments: Any) -> str | None:
    """The name of a step; None where a row of the table is not accbench's own.

    Args:
        facts: what a step does, in a form whose `repr` says all.
        arguments: that it is called with.
    """
    if not table.is_own():
        return None
    leaves, form = jax.tree.flatten(arguments)
    kinds = [(leaf.shape, str(leaf.dtype), str(leaf.sharding)) for leaf in leaves]
    settings = {
        name: value for name, value in sorted(jax.config.values.items())
        if not any(part in name for part in ("cache", "_dir", "log", "coordination"))
    }  # fmt: skip
    environment = {k: v for k, v in sorted(os.environ.items()) if k.startswith("JAX_")}
    everything = (_versions(), settings, environment, facts, str(form), kinds)
    return hashlib.sha256(repr(everything).encode()).hexdigest()


@cache
def _versions() -> tuple[str, ...]:
    """Of all that makes a step, this package's by its text."""
    package = Path(accbench.__file__).parent
    text = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        text.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return (torch.__version__, *map(importlib.metadata.version, ("jax", "jaxlib", "numpy")),
            text.hexdigest())  # fmt: skip
