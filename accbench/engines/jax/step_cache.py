"""Steps on disk as JAX has them before compiling, for capturing them takes seconds.

Each step is a file in JAX's own format for exported functions (jax.export, which is no pickle).
Its name is a digest of all that the step does.
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
# JAX allows only custom calls that it knows. Ours is registered in every process, and a new version
# of JAX, which may have others of cuDNN's, has a cache of its own.
_CUSTOM_CALLS = (torch_calls.TARGET, "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
_DISABLED_CHECKS = tuple(map(jax.export.DisabledSafetyCheck.custom_call, _CUSTOM_CALLS))
# Steps in the folder, about a megabyte each; the least recently used are deleted.
_MAX_FILES = 100


class StepCache:
    """A folder of exported steps.

    Args:
        folder: made where it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str, arguments: tuple[Any, ...], build: Callable[[], Any]) -> Any:
        """Return a jitted step that reuses its first two arguments' memory.

        Args:
            key: the step's `step_key`.
            arguments: that it will be called with.
            build: returns the jitted step, if it is not in the folder.
        """
        path = self.folder / f"{key}.jaxexport"
        with contextlib.suppress(Exception):  # damaged, or written by another version of JAX
            data = path.read_bytes()
            checksum, content = data[:_CHECKSUM_BYTES], data[_CHECKSUM_BYTES:]
            if hashlib.sha256(content).digest() == checksum:
                path.touch()
                return _jit(jax.export.deserialize(bytearray(content)))
        function = build()
        try:
            exported = jax.export.export(function, disabled_checks=_DISABLED_CHECKS)(*arguments)
            content = bytes(exported.serialize())
        except Exception:  # JAX cannot export some operations
            return function
        with contextlib.suppress(OSError):  # a full disk: the step is captured again next time
            self._write(path, hashlib.sha256(content).digest() + content)
        # The same as from the file, or JAX's compile cache would miss at the next start.
        return _jit(jax.export.deserialize(bytearray(content)))

    def _write(self, path: Path, content: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            try:
                file.write(content)
                file.close()
                Path(file.name).replace(path)
            finally:
                Path(file.name).unlink(missing_ok=True)  # if it was not renamed
        by_age = sorted(self.folder.glob("*.jaxexport"), key=lambda p: p.stat().st_mtime)
        for old in by_age[:-_MAX_FILES]:
            old.unlink(missing_ok=True)


def _jit(exported: Any) -> Any:
    return jax.jit(exported.call, donate_argnums=(0, 1))


def step_key(*facts: Any, arguments: Any) -> str | None:
    """Return a step's file name, or None where a row of the table is not accbench's own.

    Args:
        *facts: what the step does, in a form whose `repr` says all.
        arguments: that it is called with.
    """
    if not table.all_rows_builtin():
        return None
    leaves, treedef = jax.tree.flatten(arguments)
    signatures = [(leaf.shape, str(leaf.dtype), str(leaf.sharding)) for leaf in leaves]
    settings = {
        name: value for name, value in sorted(jax.config.values.items())
        if not any(part in name for part in ("cache", "_dir", "log", "coordination"))
    }  # fmt: skip
    environment = {k: v for k, v in sorted(os.environ.items()) if k.startswith("JAX_")}
    everything = (_versions(), settings, environment, facts, str(treedef), signatures)
    return hashlib.sha256(repr(everything).encode()).hexdigest()


@cache
def _versions() -> tuple[str, ...]:
    """Return the versions of all that makes a step: this package's is a digest of its text."""
    package = Path(accbench.__file__).parent
    text = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        text.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return (torch.__version__, *map(importlib.metadata.version, ("jax", "jaxlib", "numpy")),
            text.hexdigest())  # fmt: skip
