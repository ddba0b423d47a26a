"""Cycles are not looked for during imports, and as ever afterwards."""

import gc
import weakref

import pytest

from accbench.system.gc_pause import pause_gc


class Node:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _nothing_stays_frozen():
    yield
    gc.enable()
    gc.unfreeze()


def test_what_is_there_by_then_is_left_out_and_what_comes_is_not():
    with pause_gc():
        assert not gc.isenabled()
        with pause_gc():
            pass
        assert not gc.isenabled()
        stays = weakref.ref(Node())
    assert gc.isenabled()
    goes = weakref.ref(Node())
    gc.collect()
    assert stays() is not None
    assert goes() is None


def test_who_has_turned_the_collector_off_keeps_it_off():
    gc.disable()
    with pytest.raises(ImportError), pause_gc():
        raise ImportError
    assert not gc.isenabled()
    assert gc.get_freeze_count() == 0
