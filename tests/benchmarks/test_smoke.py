"""Every benchmark that backs a claim runs to its end with `--tiny`, and prints its table."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import ROOT, python

FOLDER = ROOT / "benchmarks"
soak = pytest.mark.soak


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")


# Script -> (arguments beside --tiny, environment, what it prints). FOLDER is a new folder.
CASES = {
    "activation_bytes": ([], {}, ["| llama_tiny, 1 x 16 | 2 |"]),
    "checkpoint_cost": (["FOLDER"], {}, ["training stood still for", "killed after step"]),
    "context_parallel_bytes": ([], {}, ["| 2 | ulysses |", "| 2 | ring |", "| 4 | ring |"]),
    "digits_table": (["FOLDER"], {}, ["| 1 | float32 | ddp |"]),
    "engine_overhead": ([], {}, ["ratio", "1 processes of 1 turns of 2 steps"]),
    "engine_speed": (["FOLDER"], {}, ["| model, type, workers | inductor |", "resnet50, float32"]),
    "fsdp_losses": (["FOLDER"], {}, ["| tiny | 2 |"]),
    "gpu_day": (
        ["FOLDER", "--state", "FOLDER", "--device=cpu", "--items=bare-rn50-e,rn50-bfloat16-ddp"],
        {}, ["| bare-rn50-eager |", "| rn50-bfloat16-ddp |", "2 of 2 items done, failed: none"],
    ),
    "gpu_meshes": (
        ["FOLDER", "--state", "FOLDER", "--device=cpu", "--items=8b-zero3,1b-pp2"],
        {}, ["| 8b-zero3-inductor | inductor | --dp_shard=auto |", "failed: none"],
    ),
    "input_rates": (["FOLDER"], {}, ["| photographs: RecordIO |", "| faces: RecordIO |"]),
    "interval_coverage": ([], {}, ["| normal | turns | 2 | t |", "| drift | fixed | 10 | t |"]),
    "kill_soak": (["FOLDER"], {}, ["equal bit for bit; left over: nothing"]),
    "mesh_losses": (["FOLDER"], {}, ["| ddp | 5.", "| tp2-shard2 | 5."]),
    "model_sweep": (["FOLDER"], {}, ["| benchmarks.nets:tiny | 32 | 2 | same |"]),
    "numerics_trials": (["FOLDER"], {}, ["| ddp:again | same |", "| dropout_off | found |"]),
    "peers": (
        ["FOLDER"], {},
        [*(f"| {who} | 1 |" for who in ("a bare loop", "accbench run", "accbench.accelerate")),
         "| accbench.accelerate | 4 | 5 |"],
    ),
    "partial_fc_memory": ([], {}, ["| sample_rate 0.1 |"]),
    "preflight_table": (["FOLDER"], {}, ["| benchmarks.nets:tiny, 4 | xla | 1 x h100 | float16 |"]),
    "scaling": ([], {}, ["of which reducing", "| ddp |"]),
    "second_starts": (["FOLDER", "--engines=ddp,jax"], {}, ["| ddp |", "| jax |"]),
    "sharding_memory": ([], {}, ["| ddp |", "| zero 3 |"]),
    "structure": ([], {}, ["| rooms of accbench | 19 |", "| arrows in circles | 0 |"]),
    "two_nodes": ([], {}, ["| ddp | 1 |", "equal"]),
    "verdict_trials": (["FOLDER", "--busy=1"], {}, ["same: ", "slowed: ", " repeated"]),
}  # fmt: skip
MARKS = {
    "activation_bytes": [needs("transformers")],
    "context_parallel_bytes": [soak],
    "digits_table": [soak, needs("sklearn")],
    "engine_speed": [soak],
    "fsdp_losses": [soak, needs("transformers")],
    "gpu_meshes": [soak, needs("transformers"), needs("jax")],
    "kill_soak": [soak],
    "mesh_losses": [soak, needs("transformers")],
    "partial_fc_memory": [soak],
    "peers": [soak, needs("transformers")],
    "preflight_table": [soak, pytest.mark.xla, needs("torch_xla"), needs("jax_plugins")],
    "scaling": [soak],
    "second_starts": [soak, needs("jax")],
    "sharding_memory": [soak],
    "two_nodes": [soak],
    "verdict_trials": [soak],
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, [])) for n in CASES])
def test_tiny_run_prints_its_table(name, tmp_path):
    arguments, env, expected = CASES[name]
    words = [str(tmp_path / "out") if word == "FOLDER" else word for word in arguments]
    # What it starts is forked as well, but for the soak, which has time for a user's starts.
    forked = [] if soak in MARKS.get(name, []) else ["-m", "tests.all_forked"]
    script = [*forked, f"benchmarks/{name}.py"]
    done = python(*script, *words, "--tiny", PYTHONPATH=str(ROOT), **env)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in expected:
        assert text in done.stdout, done.stdout + done.stderr


def test_the_model_of_many_devices_prints_its_tables():
    done = python("benchmarks/scaling_model.py", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert "| ResNet-50, V100, FP32 [1] | 1 | 8 | 97.2% |" in done.stdout


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def scripts(folder: Path) -> list[Path]:
    """Return the files that can be run as commands."""
    return [p for p in sorted(folder.glob("*.py")) if '__name__ == "__main__"' in p.read_text()]


def test_every_script_has_a_tiny_run_or_takes_a_moment():
    # `numerics_passes` is a process of numerics_trials, `sweep_models` prints model_sweep's list.
    others = {"numerics_passes", "scaling_model", "sweep_models"}
    assert {path.stem for path in scripts(FOLDER)} == set(CASES) | others


def test_every_script_stands_in_the_table_of_its_folder():
    for folder in (FOLDER, FOLDER / "research"):
        page = (folder / "README.md").read_text()
        missing = [p.name for p in scripts(folder) if f"`{p.name}`" not in page]
        assert not missing, folder


@pytest.mark.parametrize("folder", ["accbench", "benchmarks", "examples"])
def test_nothing_outside_tests_imports_tests(folder):
    for path in (ROOT / folder).rglob("*.py"):
        wrong = [name for name in imported(path) if name.split(".")[0] == "tests"]
        assert not wrong, path
        assert "tests.nets" not in path.read_text(), path
