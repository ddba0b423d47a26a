"""docs/extending.md: its examples are plug-ins that the contracts accept."""

import contextlib
import inspect
import re
from typing import Any

import pytest

from tests.conftest import ROOT

with contextlib.suppress(ImportError):  # sets environment variables, so before any test
    import jax  # noqa: F401

PAGE = (ROOT / "docs" / "extending.md").read_text()


def example(name: str) -> Any:
    """Return what the page's example of `name` defines."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if re.search(rf"^(?:class|def) {name}\b", block, re.M))
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(block, namespace)
    return namespace[name]


@pytest.mark.parametrize("name", ["Engine", "Source"])
def test_example_defines_all_that_the_contract_asks_for(name):
    plugin = example(name)
    assert not inspect.isabstract(plugin)


def test_source_reads_an_image():
    image_HWC, label = example("Squares")(8).read(200)
    assert (image_HWC.shape, label) == ((8, 8, 3), 1)


def test_options_have_help_and_range():
    (field,) = example("Options").__dataclass_fields__.values()
    assert field.metadata["help"].endswith(".")
    assert field.metadata["minimum"] == 1


def test_lowering_is_in_the_table():
    pytest.importorskip("jax")
    from accbench.engines.jax.lowering import table

    example("foo")
    try:
        assert table.row("aten.foo.default").function(1, 2, alpha=3) == 7
    finally:
        del table._rows["aten.foo.default"]
