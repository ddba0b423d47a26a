"""Finding the plugin, its compiler and the driver, on machines that are made up here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accbench.pjrt import nvidia, xla_flags
from accbench.preflight import compiling, whole_step

from .fake_cuda import make_driver

ROOT = Path(__file__).parents[2]
ASK = """
import dataclasses, json
from accbench.pjrt import nvidia, xla_flags
from accbench.preflight import compiling, whole_step
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
        if name.split(".")[0] in ("jax_plugins", "nvidia") or name == "triton":
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


@pytest.mark.parametrize("layout", ["cu12", "cu13", "triton"])
def test_ptxas_and_libdevice_are_found_wherever_a_package_has_them(
    site: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    for name in ("CUDA_ROOT", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(site))
    monkeypatch.setenv("XDG_CACHE_HOME", str(site / "cache"))
    monkeypatch.setattr(nvidia, "Path", lambda *parts: Path(*parts) / "not here"
                        if parts == ("/usr/local/cuda",) else Path(*parts))  # fmt: skip
    assert nvidia.toolkit(None) is None
    root, libdevice = {
        "cu12": (site / "nvidia/cuda_nvcc", "nvvm/libdevice"),
        "cu13": (site / "nvidia/cu13", "nvvm/libdevice"),
        "triton": (site / "triton/backends/nvidia", "lib"),
    }[layout]
    for folder, file in (("bin", "ptxas"), (libdevice, "libdevice.10.bc")):
        (root / folder).mkdir(parents=True)
        (root / folder / file).write_text(file)
    found = nvidia.toolkit(None)
    assert found is not None
    assert (found / "nvvm/libdevice/libdevice.10.bc").read_text() == "libdevice.10.bc"
    assert (found / "bin/ptxas").read_text() == "ptxas"
    assert nvidia.toolkit(None) == found  # at the second call, too


def test_flags_that_a_plugin_lacks_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.11.2 has the name of one that it gave up, among a protocol buffer's reserved ones."""
    plugin = tmp_path / "xla_cuda_plugin.so"
    known = [
        flag.name for flag in xla_flags.GPU_FLAGS if flag.name != "xla_gpu_graph_min_graph_size"
    ]
    reserved = b"R!xla_gpu_graph_min_graph_sizeR!xla_gpu_enable_split_k_autotuningR"
    plugin.write_bytes(b"".join(b"\0" + name.encode() + b"\0" for name in known) + reserved)
    monkeypatch.setenv(nvidia.PLUGIN_VARIABLE, str(plugin))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    unknown = xla_flags.unknown_in_table(nvidia.find_plugin())
    assert unknown == ("xla_gpu_graph_min_graph_size",)
    flags = xla_flags.parse(xla_flags.merge("cuda", "xla_gpu_autotune_level=2", unknown))
    assert flags.keys() == set(known)
    assert flags["xla_gpu_autotune_level"] == "2"
    asked = xla_flags.merge("cuda", "xla_gpu_graph_min_graph_size=1", unknown)
    assert "xla_gpu_graph_min_graph_size=1" in asked  # a user's own are the user's
    given = compiling.environment(tmp_path, "")["XLA_FLAGS"]
    assert "--xla_gpu_autotune_level=0" in given
    assert "split_k" not in given
    assert "xla_gpu_enable_split_k_autotuning" in whole_step._notes()[1]


def test_workers_of_a_machine_share_its_cores_for_compiling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(xla_flags.cgroups, "num_cores", lambda: 192)
    assert "--xla_gpu_force_compilation_parallelism=24" in xla_flags.merge("cuda", "").split()
