"""Models that come wrapped, traced, without shapes or without gradients."""

import json

import pytest

from tests.conftest import TINY, end_of, python, run, two_ranks
from tests.engine_params import NEEDS_COMPILER, NEEDS_JAX, XLA

WRAPPED = ("DistributedDataParallel", "DataParallel", "torch.compile", "both",
           "part in DistributedDataParallel", "part in torch.compile")  # fmt: skip
REFUSED = {
    "frozen": "has no parameter that trains",
    "lazy": "0.weight has no shape yet, as those of LazyLinear and the like: run one batch",
    "quantized": "at 1.0 is a quantized Linear, which has no gradients",
    "hooked": "with a communication hook, which engines do not run",
    "on meta": "model's weight is on the device meta",
}
SCRIPTED = ("traced", "scripted part")
# An engine gets the model without its wrappers; those of torch.compile are what jax's could be
# taken for.
COMPILED = ("torch.compile", "part in torch.compile")


@pytest.mark.parametrize(("engine", "wrapped"), [
    pytest.param("ddp", WRAPPED, id="ddp"),
    pytest.param("inductor", WRAPPED, id="inductor", marks=[pytest.mark.soak, NEEDS_COMPILER]),
    pytest.param("jax", COMPILED, id="jax", marks=NEEDS_JAX),
    pytest.param("jax", WRAPPED, id="jax-all", marks=[NEEDS_JAX, pytest.mark.soak]),
    pytest.param(*XLA.values, WRAPPED, id="xla", marks=XLA.marks),
])  # fmt: skip
def test_what_is_wrapped_trains_as_it_is_inside_and_the_rest_is_told(engine, wrapped, tmp_path):
    kinds = (*wrapped, *SCRIPTED, *REFUSED)
    done = python("-m", "tests.training.wrapped", engine, tmp_path / "run", *kinds)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "run-rank0.json").read_text())
    scripted = {kind: found.pop(kind) for kind in SCRIPTED}
    for kind in (*wrapped, *(scripted if engine == "ddp" else ())):
        far, *same = found.pop(kind) if kind in found else scripted[kind]
        assert (far < 1e-6, *same) == (True, True, True), kind
    if engine != "ddp":
        assert "at part is a RecursiveScriptModule of torch.jit" in scripted["scripted part"]
        for line in scripted.values():
            assert f"that --engine {engine} cannot compile" in line
            assert "use --engine ddp" in line
    assert found.keys() == REFUSED.keys()
    for kind, words in REFUSED.items():
        assert words in found[kind]
        assert "\n" not in found[kind]


def test_gradients_are_averaged_once_where_the_script_has_wrapped_its_model(tmp_path):
    done = two_ranks("-m", "tests.training.wrapped", "ddp", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"run-rank{rank}.json").read_text())
        assert len(found) == 2
        assert all(far < 1e-6 for far, *_ in found.values())


def test_a_compiled_model_is_trained_and_exported_by_its_own_names(images, tmp_path):
    done = run(*TINY, "--model=tests.training.wrapped:compiled_images", "--image_size=8",
               f"--data=mock:{images}", "--max_steps=1", "--warmup_steps=1", "--log_interval=1",
               f"--output_dir={tmp_path / 'run'}")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "came wrapped in torch.compile" in done.stdout
    assert end_of(tmp_path / "run").num_steps == 1
    out = tmp_path / "weights"
    done = run("accbench", "export", tmp_path / "run", out, "--format=safetensors", script="-m")
    assert done.returncode == 0, done.stderr
    from safetensors.torch import load_file

    assert sorted(load_file(out)) == ["1.bias", "1.weight"]
