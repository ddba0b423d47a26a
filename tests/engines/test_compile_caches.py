"""What was compiled, captured or recorded is used again only where it is the very same."""

import importlib.util
import json
import os
import shutil
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from accbench.engines.common import compile_cache_key, python_snapshot, python_state
from tests.conftest import python
from tests.engine_params import COMPILED
from tests.engines import changing_models, edited_models

needs_jax = pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="needs jax")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
ENGINES = COMPILED
# Inductor sees these as it does an attribute, or by torch's own guards alone; two of them have it
# compile in each step.
LEFT_TO_TORCH = (
    "function", "nested", "global", "class", "set by the first step", "lazily set", "counted",
    "drawn", "drawn by another", "every step",
)  # fmt: skip
REFUSED_BY_JAX = {
    "counted": "every forward pass changes count",
    "drawn": "random numbers of Python's or numpy's",
    "drawn by another": "random numbers of Python's or numpy's",
    "every step": "temperature changes before every step",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("caches")


@cache
def found_by(module: str, engine: str, folder: Path, *arguments: object) -> dict:
    done = python(
        "-m", f"tests.engines.{module}", engine, *arguments,
        NPROC="1", OMP_NUM_THREADS="1", XDG_CACHE_HOME=str(folder / engine),
        TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# Starts are told apart by torch's own memory of its key, which is emptied, so that one process does
# for all; what is read of Triton's files is read once in any case.
DIGESTS_OF_STARTS = """
import json, sys, threading
from pathlib import Path
from accbench.engines.inductor import cache_digests
from torch._inductor import codecache

def read_bytes():
    return int(open("/proc/self/io").readline().split()[1])

def start():
    before = read_bytes()
    codecache.torch_key.clear()
    cache_digests.begin("cpu")
    codecache.CacheBase.get_system()
    key = codecache.torch_key()
    for thread in threading.enumerate():
        if thread.name == "digest":
            thread.join()
    return read_bytes() - before, key.hex()

found = [start(), start()]
kept = Path(codecache.cache_dir(), cache_digests.KEPT_FILE)
good = kept.read_text()
for damage in json.loads(sys.argv[1]):
    is_part = isinstance(damage, dict)
    kept.write_text(json.dumps({**json.loads(good), **damage}) if is_part else damage)
    found.append(start())
    assert kept.read_text() == good
codecache.torch_key.clear()
print(json.dumps([*found, [0, codecache.torch_key().hex()]]))
"""


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux")
def test_a_second_start_by_inductor_reads_no_sources_and_none_of_tritons_files(tmp_path):
    """Triton's library alone is half a gigabyte, and a CPU has no use for it."""
    others = {"torch_key": "11" * 32, "fingerprint": "of other files"}
    damages = ["", "[]", {"torch_key": "00"}, others]
    done = python(
        "-c", DIGESTS_OF_STARTS, json.dumps(damages), TORCHINDUCTOR_CACHE_DIR=str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    (cold, warm, *damaged, _), keys = zip(*json.loads(done.stdout), strict=True)
    assert len(set(keys)) == 1  # the last of which torch took by itself
    assert 10e6 < cold < 150e6  # torch's own sources
    assert warm < 1e6
    assert len(damaged) == len(damages)
    assert min(damaged) > 10e6


def test_a_fingerprint_of_sources_sees_what_python_would_compile_anew(tmp_path):
    from accbench.engines.inductor.cache_digests import fingerprint

    source, other = tmp_path / "a.py", tmp_path / "b" / "c.py"
    other.parent.mkdir()
    source.write_text("one = 1")
    other.write_text("")
    os.utime(source, ns=(10**18, 10**18))
    found = [fingerprint(tmp_path)]
    source.write_text("one = 2")  # of the same size, at another time
    os.utime(source, ns=(10**18, 10**18 + 1))
    found.append(fingerprint(tmp_path))
    other.write_text("#")
    found.append(fingerprint(tmp_path))
    other.rename(other.with_name("d.py"))
    found.append(fingerprint(tmp_path))
    assert len(set(found)) == 4
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_text("compiled")
    assert fingerprint(tmp_path) == found[-1]


def is_left_to_torch(engine: str, case: str) -> bool:
    return engine == "inductor" and case in LEFT_TO_TORCH


def cases_beside(engine: str, case: str) -> list[str]:
    """Those that one process has together with this one."""
    left = is_left_to_torch(engine, case)
    return [other for other in changing_models.CASES if is_left_to_torch(engine, other) == left]


@pytest.mark.parametrize(("case", "engine"), [
    pytest.param(case, *engine.values, marks=[
        *engine.marks, *([pytest.mark.soak] if is_left_to_torch(*engine.values, case) else []),
    ])
    for case in changing_models.CASES for engine in ENGINES
])  # fmt: skip
def test_what_changes_between_two_steps_counts_from_there_on(engine, case, folder):
    """Attributes, nests of them, functions, hooks, globals, closures: as in plain torch."""
    found = found_by("changing_models", engine, folder, *cases_beside(engine, case))[case]
    if engine == "jax" and case in REFUSED_BY_JAX:
        assert found["raised"].startswith("RequestError: --engine jax captures ")
        assert REFUSED_BY_JAX[case] in found["raised"]
        assert "use --engine inductor, xla or ddp" in found["raised"]
    else:
        assert found["losses"] == pytest.approx(found["plain"], rel=1e-4)


@pytest.mark.parametrize("engine", ENGINES[:2])
def test_code_that_is_edited_between_two_starts_counts(engine, folder):
    found = found_by("edited_models", engine, folder, folder / "code")
    assert found.keys() == set(edited_models.OF_ENGINE[engine])
    for edit, steps in found.items():
        assert steps["losses"] == pytest.approx(steps["plain"], rel=1e-4), edit
        # Nothing of another start but where the code is the same, and torch's settings are.
        assert bool(steps["found"]) == (edit == "the same again"), edit


def test_a_tag_tells_what_torchs_own_keys_leave_out(monkeypatch):
    tags = [compile_cache_key.tag("cpu"), compile_cache_key.tag("cpu", "an engine's own")]
    with torch.autocast("cpu", torch.bfloat16):
        tags.append(compile_cache_key.tag("cpu"))
    with torch.autocast("cpu", torch.float16):
        tags.append(compile_cache_key.tag("cpu"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 97)
    tags.append(compile_cache_key.tag("cpu"))
    monkeypatch.setattr(compile_cache_key, "processor_fingerprint", lambda: "another")
    tags.append(compile_cache_key.tag("cpu"))
    monkeypatch.setattr(compile_cache_key, "_patch_digest", lambda: "others")
    tags.append(compile_cache_key.tag("cpu"))
    assert len(set(tags)) == len(tags)
    with compile_cache_key.tagged(tags[0]):
        assert tags[0] in torch.compiler.config.cache_key_tag
    assert tags[0] not in torch.compiler.config.cache_key_tag


def cpuinfo(flags: str) -> str:
    return f"processor\t: 0\nmodel name\t: A CPU\ncpu MHz\t\t: 2400.5\nflags\t\t: {flags}\n"


def test_each_kind_of_processor_has_folders_of_its_own(tmp_path, monkeypatch):
    """Code for one ends in SIGILL on another, where machines share a home."""

    def named(text):
        monkeypatch.setattr(Path, "read_text", lambda self: text)
        compile_cache_key.processor_fingerprint.cache_clear()
        return compile_cache_key.processor_fingerprint()

    try:
        wide, narrow = named(cpuinfo("sse2 avx512f")), named(cpuinfo("sse2"))
        assert wide != narrow
        assert named(cpuinfo("sse2").replace("2400.5", "1200.0")) == narrow
        assert wide.isalnum()
    finally:
        monkeypatch.undo()
        compile_cache_key.processor_fingerprint.cache_clear()


@pytest.fixture
def own_environment():
    """JAX sets variables when it is imported."""
    with mock.patch.dict(os.environ):
        yield


@needs_jax
@pytest.mark.usefixtures("own_environment")
def test_jax_keeps_what_it_compiles_in_the_processors_folder(tmp_path, monkeypatch):
    import jax

    from accbench.engines.jax import engine, runtime

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    found = []
    try:
        for name in ("one", "other"):
            monkeypatch.setattr(compile_cache_key, "processor_fingerprint", lambda name=name: name)
            options = engine.Engine.Options(cache_dir=str(tmp_path))
            found.append(Path(runtime.enable_compile_cache("cpu", options)))
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    assert found[0] != found[1]
    assert [path.name.rpartition("-")[2] for path in found] == ["one", "other"]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.numbers, self.config = [1, {"rate": 0.5}], type("Config", (), {})()
        self.config.width, self.table = 3, torch.zeros(2)


CHANGES = {
    "a number in a nest": lambda net: net.numbers[1].update(rate=0.25),
    "a number of an object": lambda net: setattr(net.config, "width", 4),
    "a number of another type": lambda net: net.numbers.__setitem__(0, True),
    "a tensor that is no buffer": lambda net: net.table.fill_(1),
    "a new attribute": lambda net: setattr(net, "rate", None),
    "a hook": lambda net: net.layer.register_forward_pre_hook(lambda *_: None),
    "a module": lambda net: setattr(net, "layer", nn.Linear(2, 2)),
    "a forward": lambda net: setattr(net.layer, "forward", lambda x: x),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_has_another_number(change):
    net = Nested()
    watch = python_state.PythonStateWatch(net)
    first = watch.state_id()
    assert watch.state_id() == first
    net.eval()  # which engines look at themselves
    assert watch.state_id() == first
    CHANGES[change](net)
    assert watch.state_id() != first
    assert watch.changed


def test_what_a_trial_changes_is_taken_back():
    net = Nested()
    watch = python_state.PythonStateWatch(net)
    first = watch.state_id()
    with python_snapshot.restored(net) as saved:
        for name, change in CHANGES.items():
            if name not in ("a tensor that is no buffer", "a hook", "a module"):
                change(net)
        assert watch.state_id() != first
        assert not saved.draws_random_numbers()
    assert watch.state_id() == first
    saved = python_snapshot.PythonSnapshot(net)
    net.numbers[0], net.table, net.config.cache = 5, torch.ones(2), torch.ones(1)
    table = net.table
    saved.keep_plain()
    assert net.numbers[0] == 5
    assert net.table is not table
    assert not hasattr(net.config, "cache")
