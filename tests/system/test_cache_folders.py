"""Folders of compile caches: the user's own, and nobody else's."""

import os
import tempfile
from types import SimpleNamespace

import pytest

from accbench.errors import RequestError
from accbench.system import cache_folders
from tests import containers


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A home, a temporary folder and a run's, and no name of a cache's folder."""
    for name in ("home", "tmp", "run"):
        (tmp_path / name).mkdir()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def no_home(places, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(places / "file"))  # below which no folder can be made
    (places / "file").write_text("")


def test_the_user_s_own_comes_first(places, monkeypatch):
    assert cache_folders.folder("jax") == places / "home/.cache/accbench/jax"
    assert cache_folders.environment(places / "run") == {}
    monkeypatch.setenv("XDG_CACHE_HOME", str(places / "xdg"))
    assert cache_folders.folder("jax") == places / "xdg/accbench/jax"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which that specification ignores
    assert cache_folders.folder("jax") == places / "home/.cache/accbench/jax"


def test_without_a_home_they_are_in_a_temporary_folder_of_the_user_alone(places, monkeypatch):
    no_home(places, monkeypatch)
    before = os.umask(0)
    try:
        folder = cache_folders.folder("jax")
    finally:
        os.umask(before)
    own = places / f"tmp/accbench-{os.getuid()}"
    assert folder == own / "accbench/jax"
    assert own.stat().st_mode & 0o777 == 0o700
    env = cache_folders.environment(None)
    assert env["XDG_CACHE_HOME"] == env["TRITON_HOME"] == str(own)


@pytest.mark.parametrize("how", ["another's", "open to all", "a link"])
def test_what_others_may_write_is_no_cache(how, places, monkeypatch):
    """They would have their code run."""
    no_home(places, monkeypatch)
    own, inductor = places / f"tmp/accbench-{os.getuid()}", places / "tmp/torchinductor_ada"
    for folder in (own, inductor):
        if how == "a link":
            (places / f"of {folder.name}").mkdir()
            folder.symlink_to(places / f"of {folder.name}")
            continue
        folder.mkdir()
        if how == "open to all":
            folder.chmod(0o777)
        elif os.geteuid() == 0:
            os.chown(folder, containers.UID, containers.UID)
        else:
            pytest.skip("only root gives folders away")
    assert cache_folders.root(places / "run") == places / "run/cache"
    with pytest.raises(RequestError, match="no folder to keep what is compiled in"):
        cache_folders.folder("jax")
    with pytest.raises(RequestError, match="torchinductor_ada.*set TMPDIR"):
        cache_folders.inductor_environment(places / "run")
    monkeypatch.delenv("LOGNAME")
    monkeypatch.setenv("USER", "ada")  # an image's, which its user need not be
    assert cache_folders.inductor_environment(places / "run") == {"LOGNAME": f"uid{os.getuid()}"}
    assert (places / f"tmp/torchinductor_uid{os.getuid()}").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_the_user_s_group_may_write_is_taken_from_it(places):
    """Under the umask 002 torch makes it so."""
    (folder := places / "tmp/torchinductor_ada").mkdir()
    folder.chmod(0o775)
    assert cache_folders.inductor_environment(None) == {}
    assert folder.stat().st_mode & 0o777 == 0o755


def test_programs_are_kept_where_they_may_be_run(places, monkeypatch):
    flags = {"tmp": os.ST_NOEXEC}
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=flags.get(path.name, 0)))
    found = cache_folders.inductor_environment(places / "run")
    assert found["TORCHINDUCTOR_CACHE_DIR"] == str(places / "home/.cache/torchinductor")
