"""`accbench data convert`."""

import os
import subprocess
import sys
import time

import pytest
from PIL import Image

from accbench.data import convert as module
from accbench.data.convert import convert
from accbench.data.recordio import RecordIODataset
from accbench.data.recordio.file import MAGIC
from accbench.errors import RequestError
from tests.conftest import ROOT, python
from tests.data.pictures import jpeg, pixels


@pytest.fixture
def folder(tmp_path):
    """Two classes, three images each, one of them with the magic number in it."""
    for label in range(2):
        of_class = tmp_path / "images" / f"class{label}"
        of_class.mkdir(parents=True)
        for index in range(3):
            (of_class / f"{index}.jpg").write_bytes(jpeg(16, 24, 40 * index + 100 * label))
    (tmp_path / "images/class1/2.jpg").write_bytes(jpeg(16, 24) + b"\0" * 3 + MAGIC * 3)
    return tmp_path / "images"


def accbench(*arguments: object) -> subprocess.CompletedProcess:
    return python("-m", "accbench", "data", "convert", *arguments)


def test_every_file_is_kept_to_the_byte(folder, tmp_path):
    result = accbench(folder, tmp_path / "out/train.rec")
    assert result.returncode == 0, result.stderr
    dataset = RecordIODataset(tmp_path / "out")
    files = sorted(folder.rglob("*.jpg"))
    assert [bytes(dataset.record(i).payload) for i in range(6)] == [f.read_bytes() for f in files]
    assert [dataset[i][1] for i in range(6)] == [0, 0, 0, 1, 1, 1]
    assert (tmp_path / "out/train.classes.txt").read_text().split() == ["class0", "class1"]
    (tmp_path / "out/train.idx").unlink()
    assert len(RecordIODataset(tmp_path / "out")) == 6
    assert not list((tmp_path / "out").glob(".*"))


def test_other_kinds_of_images_are_kept_too(folder, tmp_path):
    Image.fromarray(pixels(9, 9)).save(folder / "class0" / "a.png")
    assert convert(folder, tmp_path / "a.rec") == 7


def test_a_file_that_is_no_image_is_named_and_nothing_is_left(folder, tmp_path):
    bad = folder / "class1" / "1.jpg"
    bad.write_bytes(b"no image")
    (tmp_path / "out").mkdir()
    result = accbench(folder, tmp_path / "out/train.rec")
    assert result.returncode == 2
    assert str(bad) in result.stderr.splitlines()[-1]
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.timeout(120)
def test_what_is_no_file_is_named_not_waited_for(folder, tmp_path):
    os.mkfifo(folder / "class1" / "a.jpg")
    with pytest.raises(RequestError, match="class1/a.jpg: not a regular file"):
        convert(folder, tmp_path / "a.rec")


def test_what_is_there_is_not_written_over(folder, tmp_path):
    (tmp_path / "a.rec").write_bytes(b"precious")
    with pytest.raises(RequestError, match="already there"):
        convert(folder, tmp_path / "a.rec")
    assert (tmp_path / "a.rec").read_bytes() == b"precious"
    with pytest.raises(RequestError, match="must end in .rec"):
        convert(folder, tmp_path / "a.txt")
    with pytest.raises(RequestError, match=str(tmp_path / "nowhere")):
        convert(tmp_path / "nowhere", tmp_path / "b.rec")


def test_class_names_of_any_bytes_are_kept_but_for_line_breaks(folder, tmp_path):
    (folder / "class1").rename(folder / os.fsdecode(b"caf\xe9"))
    result = accbench(folder, tmp_path / "a.rec")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "a.classes.txt").read_bytes() == b"caf\xe9\nclass0\n"
    (folder / "class0").rename(folder / "two\nlines")
    result = accbench(folder, tmp_path / "b.rec")
    assert result.returncode == 2
    assert "'two\\nlines' has a line break" in result.stderr.splitlines()[-1]


def test_interrupted_leaves_no_half_file(folder, tmp_path, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_record", interrupt)
    (tmp_path / "out").mkdir()
    with pytest.raises(KeyboardInterrupt):
        convert(folder, tmp_path / "out/train.rec")
    assert not list((tmp_path / "out").iterdir())


def test_killed_leaves_nothing_under_the_final_name(folder, tmp_path):
    for index in range(3000):
        (folder / "class0" / f"more{index}.jpg").hardlink_to(folder / "class0" / "0.jpg")
    process = subprocess.Popen(
        [sys.executable, "-m", "accbench", "data", "convert", folder, tmp_path / "train.rec"],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not list(tmp_path.glob(".train.rec*")) and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not list(tmp_path.glob("train.*"))
