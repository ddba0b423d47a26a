"""docs/flags.md, the page of all flags."""

import importlib.util
from types import ModuleType

import pytest

from tests.conftest import ROOT

MAKER = ROOT / "docs" / "make_flags.py"


@pytest.fixture(scope="module")
def make_flags() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_flags", MAKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_what_the_fields_say(make_flags):
    written = (ROOT / "docs" / "flags.md").read_text()
    assert make_flags.page() == written, "run `python docs/make_flags.py`"
