"""The wheel and the source distribution: what is in them, and that the wheel works alone."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import HANG_S, ROOT, TINY, end_of

# Where a clone keeps what is not its source.
NO_SOURCE = {".git", ".venv", ".venv-xla", "runs", "data", "build", "dist", ".hypothesis"}
# What only a clone needs.
ONLY_IN_A_CLONE = {".gitignore", ".ci/run"}


def call(*command: object, folder: Path, **env: str) -> str:
    """Standard output of a command that must end well."""
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env={**os.environ, **env},
        capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Dist(NamedTuple):
    wheel: Path
    sdist: Path


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Dist:
    """Both, made from a copy of the source; the wheel from the source distribution."""

    def no_source(folder: str, names: list[str]) -> set[str]:
        left_out = {name for name in names if name.endswith((".egg-info", "_cache", "__pycache__"))}
        return left_out | (NO_SOURCE & set(names) if Path(folder) == ROOT else set())

    folder = tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, folder / "source", ignore=no_source)
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist",
         folder / "source", folder=folder)  # fmt: skip
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return Dist(wheel, sdist)


def test_an_index_would_take_both_and_show_the_readme(dist):
    call(sys.executable, "-m", "twine", "check", "--strict", *dist, folder=dist.wheel.parent)


def test_all_of_a_clone_is_in_the_source_and_all_of_the_package_in_the_wheel(dist):
    if not (ROOT / ".git").exists():
        pytest.skip("only git knows what belongs to a clone")
    tracked = set(call("git", "ls-files", folder=ROOT).splitlines()) - ONLY_IN_A_CLONE
    tracked = {name for name in tracked if (ROOT / name).exists()}
    with tarfile.open(dist.sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked - inside == set()
    with zipfile.ZipFile(dist.wheel) as archive:
        installed = set(archive.namelist())
    assert {name for name in tracked if name.startswith("accbench/")} - installed == set()
    assert {name.split("/")[0].split("-")[0] for name in installed} == {"accbench"}


@pytest.fixture(scope="module")
def installed(dist, tmp_path_factory) -> Path:
    """bin/ of an environment with the wheel and all that it needs, but neither clone nor XLA."""
    folder = tmp_path_factory.mktemp("environment")
    call(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder)
    python = folder / "bin" / "python"
    site = Path(call(python, "-c", "import sysconfig as s; print(s.get_path('purelib'))",
                     folder=folder).strip())  # fmt: skip
    # Links, for a path in a .pth file would bring torch_xla along.
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.startswith(("accbench", "torch_xla")) and package.suffix != ".pth":
            (site / package.name).symlink_to(package)
    call(python, "-m", "pip", "install", "--no-deps", "--no-index", dist.wheel, folder=folder,
         PYTHONPATH="")  # fmt: skip
    where = call(python, "-c", "import accbench; print(accbench.__file__)", folder=folder,
                 PYTHONPATH="")  # fmt: skip
    assert Path(where.strip()) == site / "accbench" / "__init__.py"
    return folder / "bin"


def test_installed_wheel_trains_and_reports_from_any_folder(installed, tmp_path):
    flags = (*TINY, "--model=accbench.machine.self_test:net", "--data=synthetic", "--device=cpu")
    call(installed / "accbench", "run", *flags, "--output_dir=run", folder=tmp_path, PYTHONPATH="")
    end = end_of(tmp_path / "run")
    assert (end.status, end.num_steps) == ("ok", 6)
    page = call(installed / "accbench", "report", "run", "--format=html", folder=tmp_path,
                PYTHONPATH="")  # fmt: skip
    assert (ROOT / "accbench/report/page.css").read_text().splitlines()[0] in page


def test_installed_wheel_tells_what_is_here_and_how_to_install_the_rest(installed, tmp_path):
    assert "doctor" in call(installed / "accbench", "--help", folder=tmp_path, PYTHONPATH="")
    told = call(installed / "accbench", "doctor", "--format=json", folder=tmp_path, PYTHONPATH="",
                CUDA_VISIBLE_DEVICES="")  # fmt: skip
    reasons = {(x["engine"], x["device"]): x["reason"] for x in json.loads(told)["engines"]}
    assert reasons["ddp", "cpu"] is None
    assert reasons["inductor", "cpu"] is None
    assert re.search(
        r": python -m pip install .*torch==2.8.0 torch_xla==2.8.1 torchvision==0.23.0$",
        reasons["xla", "cpu"],
    )
