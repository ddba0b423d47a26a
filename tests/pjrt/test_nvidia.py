"""Finding the plugin, its compiler and the driver, on machines that are made up here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accbench.pjrt import nvidia

from .fake_cuda import make_driver

ROOT = Path(__file__).parents[2]
ASK = """
import dataclasses, json
from accbench.pjrt import nvidia
print(json.dumps({**dataclasses.asdict(nvidia.driver()), "present": nvidia.has_gpu()}))
"""


def ask_driver(**env: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", ASK], cwd=ROOT, env={**os.environ, **env},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def install_plugin(site: Path, package: str) -> Path:
    library = site / "jax_plugins" / package / "xla_cuda_plugin.so"
    library.parent.mkdir(parents=True)
    library.touch()
    # Finding a plugin must not run the package that holds it: that would import jax.
    (library.parent / "__init__.py").write_text("raise ImportError('this needs jax')")
    return library


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site-packages folder in front of all others, and no plugin elsewhere."""
    monkeypatch.delenv(nvidia.PLUGIN_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *_without_plugins(sys.path)])
    for name in list(sys.modules):  # JAX, where another test has used it, has imported some
        if name.split(".")[0] in ("jax_plugins", "nvidia"):
            monkeypatch.delitem(sys.modules, name)
    return tmp_path


def _without_plugins(path: list[str]) -> list[str]:
    return [folder for folder in path if not (Path(folder) / "jax_plugins").exists()]


def test_cuda12_is_preferred_to_cuda13_and_nothing_is_imported(site: Path) -> None:
    before = set(sys.modules)
    assert nvidia.find_plugin() is None
    cuda13 = install_plugin(site, "xla_cuda13")
    assert nvidia.find_plugin() == cuda13
    cuda12 = install_plugin(site, "xla_cuda12")
    assert nvidia.find_plugin() == cuda12
    new = set(sys.modules) - before
    assert not any(name.startswith("jax_plugins.") or name == "jax" for name in new)


def test_the_environment_names_another_plugin(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin(site, "xla_cuda12")
    monkeypatch.setenv(nvidia.PLUGIN_VARIABLE, "/elsewhere/plugin.so")
    assert nvidia.find_plugin() == Path("/elsewhere/plugin.so")


def test_toolkit_is_found_beside_the_plugin_and_needs_both_files(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    plugin = install_plugin(site, "xla_cuda12")
    root = site / "nvidia" / "cuda_nvcc"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "ptxas").touch()
    assert nvidia.toolkit(plugin) != root
    (root / "nvvm" / "libdevice").mkdir(parents=True)
    (root / "nvvm" / "libdevice" / "libdevice.10.bc").touch()
    assert nvidia.toolkit(plugin) == root


def test_the_driver_describes_its_gpus(tmp_path: Path) -> None:
    answer = ask_driver(LD_LIBRARY_PATH=str(make_driver(tmp_path, num_gpus=2)))
    assert answer["problem"] is None
    assert answer["cuda_version"] == "12.8"
    assert answer["gpus"] == [
        {"name": "NVIDIA Test 9000", "memory_bytes": 1000, "compute_capability": "9.0"},
        {"name": "NVIDIA Test 9000", "memory_bytes": 2000, "compute_capability": "9.0"},
    ]
    assert answer["present"] is True


def test_a_driver_without_a_gpu_is_a_problem_in_one_line(tmp_path: Path) -> None:
    answer = ask_driver(LD_LIBRARY_PATH=str(make_driver(tmp_path, num_gpus=0, status=100)))
    assert answer["problem"] == "the NVIDIA driver finds no GPU (CUDA_ERROR_NO_DEVICE)"


def test_gpus_that_were_hidden_are_not_there(tmp_path: Path) -> None:
    driver = str(make_driver(tmp_path, num_gpus=1))
    assert ask_driver(LD_LIBRARY_PATH=driver, CUDA_VISIBLE_DEVICES="")["present"] is False
    assert ask_driver(LD_LIBRARY_PATH=driver, CUDA_VISIBLE_DEVICES="0")["present"] is True
