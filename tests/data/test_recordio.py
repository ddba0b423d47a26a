"""RecordIO files: mxnet's own, ours, and damaged ones."""

import gc
import hashlib
import io
import itertools
import json
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms

from accbench import config, resolving
from accbench.config import plugins
from accbench.data.recordio import MXFaceDataset, RecordIODataset
from accbench.data.recordio import index as recordio_index
from accbench.data.recordio.file import (
    MAGIC,
    RecordFile,
    image_record,
    offsets,
    parse_image_record,
    write_record,
)
from accbench.distributed.process_group import Topology
from accbench.errors import BadSampleError, RequestError, UnreadableSampleError
from tests.conftest import HANG_S, TINY, end_of, run
from tests.data import recordio_fuzz
from tests.data.pictures import jpeg

WRITTEN_BY_MXNET = Path(__file__).parent / "mxnet_recordio"


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def mxnets(tmp_path) -> Path:
    """A copy of the files that mxnet wrote."""
    return Path(shutil.copytree(WRITTEN_BY_MXNET, tmp_path / "mxnets"))


def write(path: Path, records: list[bytes], index: bool = True) -> Path:
    with path.open("wb") as rec:
        begins = []
        for record in records:
            begins.append(rec.tell())
            write_record(rec, record)
    if index:
        lines = "".join(f"{key}\t{begin}\n" for key, begin in enumerate(begins))
        path.with_suffix(".idx").write_text(lines)
    return path


def faces(path: Path, count: int = 12, **options: bool) -> Path:
    """Images of 32 x 32 whose brightness is ten times their label."""
    return write(
        path,
        [image_record([float(i)], i, jpeg(32, 32, value=10 * i % 250)) for i in range(count)],
        **options,
    )


def source(path: Path, *flags: str):
    task = resolving.resolve(config.parse([*TINY, f"--data=recordio:{path}", *flags]))
    options = task.options["recordio"]
    return plugins.load("data", "recordio")(str(path), task, options, Topology())


def check_all(dataset: RecordIODataset) -> None:
    expected = json.loads((WRITTEN_BY_MXNET / "expected.json").read_text())
    assert len(dataset) == expected["num_images"]
    for index, record in enumerate(expected["records"].values()):
        payload = dataset.record(index).payload
        assert len(payload) == record["payload_bytes"]
        assert hashlib.sha256(payload).hexdigest() == record["payload_sha256"]
        image_CHW, label = dataset[index]
        assert label == record["label"]
        assert list(image_CHW.permute(1, 2, 0).shape) == record["shape_hwc"]
        assert int(image_CHW.long().sum()) == record["pillow_rgb_sum"]


def test_reads_what_mxnet_wrote(mxnets):
    check_all(RecordIODataset(mxnets))
    check_all(RecordIODataset(mxnets / "train.rec"))


def test_rebuilds_a_missing_index(mxnets):
    (mxnets / "train.idx").unlink()
    check_all(RecordIODataset(mxnets))


def test_index_from_the_cache_is_the_same(mxnets, monkeypatch):
    monkeypatch.setattr(recordio_index, "CACHED_FROM", 1)
    for _ in range(2):
        dataset = RecordIODataset(mxnets)
        check_all(dataset)
        check_all(pickle.loads(pickle.dumps(dataset)))
    (cached,) = (Path(os.environ["XDG_CACHE_HOME"]) / "accbench/recordio").iterdir()
    cached.write_bytes(cached.read_bytes()[:100])
    check_all(RecordIODataset(mxnets))


def test_cached_index_is_not_used_for_another_file(tmp_path, monkeypatch):
    monkeypatch.setattr(recordio_index, "CACHED_FROM", 1)
    path = tmp_path / "train.rec"
    assert len(RecordIODataset(faces(path, 3))) == 3
    assert len(RecordIODataset(faces(path, 7))) == 7
    assert len(list((Path(os.environ["XDG_CACHE_HOME"]) / "accbench/recordio").iterdir())) == 1


def test_cached_index_is_not_used_for_a_copy_that_keeps_size_and_time(tmp_path, monkeypatch):
    """As `cp -p` and `rsync -t` make it."""
    monkeypatch.setattr(recordio_index, "CACHED_FROM", 1)
    path = faces(tmp_path / "train.rec", 7)
    index = path.with_suffix(".idx")
    index.write_text(
        "".join(f"{k}\t{o}\n" for k, o in enumerate(RecordIODataset(path)._index.offsets))
    )
    labels = [RecordIODataset(path)[number][1] for number in range(7)]
    status, lines = index.stat(), index.read_text().splitlines()
    keys, offsets = zip(*(line.split("\t") for line in lines), strict=True)
    swapped = [*zip(keys, offsets, strict=True)]
    swapped[1], swapped[2] = (keys[1], offsets[2]), (keys[2], offsets[1])
    index.write_text("".join(f"{key}\t{offset}\n" for key, offset in swapped))
    os.utime(index, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (index.stat().st_size, index.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    labels[1], labels[2] = labels[2], labels[1]
    assert [RecordIODataset(path)[number][1] for number in range(7)] == labels


def test_index_is_read_where_no_cache_can_be_written(mxnets, monkeypatch, tmp_path):
    monkeypatch.setattr(recordio_index, "CACHED_FROM", 1)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    dataset = RecordIODataset(mxnets)
    check_all(pickle.loads(pickle.dumps(dataset)))


def test_writes_what_mxnet_writes():
    content = (WRITTEN_BY_MXNET / "train.rec").read_bytes()
    written = io.BytesIO()
    with RecordFile(WRITTEN_BY_MXNET / "train.rec") as file:
        for offset in offsets(memoryview(content)):
            write_record(written, bytes(file.read(offset)))
    assert written.getvalue() == content


pieces = st.lists(st.sampled_from([MAGIC, b"\0", b"ab", MAGIC[:2], b"data"]) | st.binary())


@settings(max_examples=300, deadline=None)
@given(st.lists(pieces.map(b"".join), min_size=1, max_size=6))
def test_any_bytes_come_back(tmp_path_factory, payloads):
    path = tmp_path_factory.mktemp("any") / "any.rec"
    write(path, [image_record([float(i)], i, payload) for i, payload in enumerate(payloads)])
    for indexed in (True, False):
        if not indexed:
            path.with_suffix(".idx").unlink()
        dataset = RecordIODataset(path)
        read = [bytes(dataset.record(index).payload) for index in range(len(dataset))]
        assert read == payloads
        dataset.close()


def test_first_of_several_labels_counts(tmp_path):
    path = write(tmp_path / "a.rec", [image_record([3.0, 1.0, 2.0], 0, jpeg(8, 8))])
    dataset = RecordIODataset(path)
    assert dataset[0][1] == 3
    assert dataset.record(0).labels.tolist() == [3, 1, 2]


def test_keys_need_not_be_in_order_nor_without_gaps(tmp_path):
    path = faces(tmp_path / "a.rec", 4)
    lines = path.with_suffix(".idx").read_text().splitlines()
    begins = [line.split("\t")[1] for line in lines]
    pairs = [(30, begins[3]), (7, begins[1]), (2, begins[0]), (11, begins[2])]
    path.with_suffix(".idx").write_text("".join(f"{key}\t{begin}\n" for key, begin in pairs))
    assert [label for _, label in RecordIODataset(path)] == [0, 1, 2, 3]


def test_transform_gets_a_pil_image(tmp_path):
    def transform(image):
        assert isinstance(image, Image.Image)
        assert image.mode == "RGB"
        return image.size

    assert RecordIODataset(faces(tmp_path / "a.rec", 2), transform)[1] == ((32, 32), 1)


def test_faces_are_scaled_and_mirrored(mxnets):
    dataset = MXFaceDataset(mxnets, local_rank=0)
    plain = RecordIODataset(mxnets)[4][0].float() / 127.5 - 1
    seen = [dataset[4][0] for _ in range(30)]
    assert all(image.dtype == torch.float32 for image in seen)
    mirrored = [bool(torch.equal(image, plain.flip(2))) for image in seen]
    assert all(m or torch.equal(image, plain) for m, image in zip(mirrored, seen, strict=True))
    assert 0 < sum(mirrored) < 30


def test_faces_have_what_insightfaces_have(mxnets):
    dataset = MXFaceDataset(mxnets, local_rank=0)
    expected = json.loads((WRITTEN_BY_MXNET / "expected.json").read_text())
    assert dataset.header0 == tuple(expected["header0_label"])
    assert dataset.imgidx.tolist() == list(range(1, 41))
    assert dataset.imgrec.keys == list(range(44))
    for key in (1, 40):
        record = parse_image_record(dataset.imgrec.read_idx(int(key)))
        assert record.label == expected["records"][str(key)]["label"]
        assert (
            hashlib.sha256(record.payload).hexdigest()
            == (expected["records"][str(key)]["payload_sha256"])
        )
    with pytest.raises(KeyError, match="no record of key 44"):
        dataset.imgrec.read_idx(44)
    label = dataset[0][1]
    assert (label.dtype, label.shape) == (torch.int64, ())


def test_part_of_the_faces(mxnets):
    dataset = MXFaceDataset(mxnets, local_rank=0)
    labels = [int(dataset[index][1]) for index in range(40)]
    dataset.imgidx = dataset.imgidx[30:20:-5]
    dataset = pickle.loads(pickle.dumps(dataset))
    assert len(dataset) == 2
    assert [int(label) for _, label in dataset] == [labels[30], labels[25]]
    assert int(dataset[-1][1]) == labels[25]


def test_faces_without_a_header_are_all_records(tmp_path):
    faces(tmp_path / "train.rec", 4)
    dataset = MXFaceDataset(tmp_path, 0)
    assert dataset.imgidx.tolist() == [0, 1, 2, 3]
    assert not hasattr(dataset, "header0")


def test_faces_are_scaled_once_by_another_transform(mxnets):
    dataset = MXFaceDataset(mxnets, local_rank=0)
    scaled = transforms.Compose(
        [
            transforms.ToPILImage(),
            transforms.ToTensor(),
            transforms.Normalize(mean=[0.5, 0.5, 0.5], std=[0.5, 0.5, 0.5]),
        ]
    )
    plain_CHW = RecordIODataset(mxnets)[4][0]
    dataset.transform = scaled
    torch.testing.assert_close(dataset[4][0], plain_CHW.float() / 127.5 - 1)
    dataset.transform = None
    assert (dataset[4][0] == plain_CHW.permute(1, 2, 0).numpy()).all()


def test_errors_in_a_script_name_no_flag(tmp_path):
    with pytest.raises(RequestError) as caught:
        MXFaceDataset(tmp_path)
    assert str(caught.value) == f"there is no file {tmp_path / 'train.rec'}"
    with pytest.raises(RequestError, match="^--data: there is no file"):
        plugins.load("data", "recordio").check(str(tmp_path))


@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_worker_processes_read_the_same(mxnets, start):
    loader = DataLoader(
        RecordIODataset(mxnets), batch_size=1, num_workers=2, multiprocessing_context=start
    )
    sums = [int(images.long().sum()) for images, _ in loader]
    expected = json.loads((WRITTEN_BY_MXNET / "expected.json").read_text())["records"]
    assert sums == [record["pillow_rgb_sum"] for record in expected.values()]


def test_no_handle_is_left_open(mxnets):
    def handles() -> list[str]:
        maps = [m.path for m in psutil.Process().memory_maps() if str(mxnets) in m.path]
        return maps + [f.path for f in psutil.Process().open_files() if str(mxnets) in f.path]

    dataset = RecordIODataset(mxnets)
    dataset[0]
    record = dataset.record(0)
    assert handles()
    dataset.close()
    assert len(record.payload) == 1584  # what was handed out still stands
    del record
    gc.collect()
    assert not handles()
    RecordIODataset(mxnets)[0]
    gc.collect()
    assert not handles()


def test_random_access_is_cheap_in_memory(tmp_path):
    """A million records in a sparse file: neither opening nor reading holds them."""
    path, num_records, stride = tmp_path / "train.rec", 1_000_000, 4096
    with path.open("wb") as file:
        file.truncate(num_records * stride)
        record = image_record([1.0], 0, jpeg(8, 8))
        framed = io.BytesIO()
        write_record(framed, record + bytes(stride - 8 - len(record)))
        for index in (0, 123_456, num_records - 1):
            file.seek(index * stride)
            file.write(framed.getvalue())
    lines = "".join(f"{i}\t{i * stride}\n" for i in range(num_records))
    path.with_suffix(".idx").write_text(lines)
    dataset = RecordIODataset(path)
    assert len(dataset) == num_records
    assert [dataset[index][1] for index in (123_456, num_records - 1)] == [1, 1]
    assert len(pickle.dumps(dataset)) < 2000
    with pytest.raises(UnreadableSampleError, match=str(5 * stride)):
        dataset[5]


# Faults


def damage(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def begin_of(path: Path, index: int) -> int:
    return int(path.with_suffix(".idx").read_text().splitlines()[index].split("\t")[1])


@pytest.mark.parametrize(
    ("at", "content", "reason"),
    [
        (0, b"\0\0\0\0", "magic number"),
        (4, struct.pack("<I", (1 << 29) - 1), "a part of 536870911 bytes, but the file ends"),
        (4, struct.pack("<I", 3 << 29 | 100), "cannot begin"),
        (4, struct.pack("<I", 1 << 29 | 100), "lacks its end|instead of the magic"),
        (4, struct.pack("<I", 7 << 29), "cannot begin"),
        (4, struct.pack("<I", 8), "too short"),
        (8, b"\xff\xff\xff\x7f", "labels, more than"),
        (12, struct.pack("<f", float("nan")), "label nan"),
        (12, struct.pack("<f", 1.5), "label 1.5"),
        (12, struct.pack("<f", -1), "label -1"),
        (32, b"no JPEG", "no image"),
    ],
)
def test_damaged_record_is_named_with_file_and_offset(tmp_path, at, content, reason):
    path = faces(tmp_path / "a.rec")
    begin = begin_of(path, 5)
    damage(path, begin + at, content)
    dataset = RecordIODataset(path)
    with pytest.raises(UnreadableSampleError, match=reason) as caught:
        dataset[5]
    assert f"{path}, offset" in str(caught.value)
    assert dataset[4][1] == 4
    assert dataset[6][1] == 6


def test_bit_flip_is_strict_by_default_and_counted_within_the_budget(tmp_path):
    path = faces(tmp_path / "train.rec", 12)
    damage(path, begin_of(path, 5), b"\0")
    with pytest.raises(BadSampleError, match="offset"):
        list(source(tmp_path).train_loader())
    loader = source(tmp_path, "--max_bad_samples=1").train_loader()
    labels = torch.cat([labels for _, labels in loader]).tolist()
    assert loader.num_bad_samples == 1
    assert sorted(labels) == [0, 1, 2, 3, 4, 6, 6, 7, 8, 9, 10, 11]


def test_truncated_file_is_refused_at_once(tmp_path):
    path = faces(tmp_path / "a.rec")
    os.truncate(path, begin_of(path, 9))
    with pytest.raises(RequestError, match="cut short") as caught:
        RecordIODataset(path)
    assert str(path) in str(caught.value)
    path.with_suffix(".idx").unlink()
    assert len(RecordIODataset(path)) == 9
    os.truncate(path, path.stat().st_size - 5)
    with pytest.raises(RequestError, match=r"offset .* but the file ends at"):
        RecordIODataset(path)


def test_file_that_shrinks_while_open_does_not_kill_the_process(tmp_path):
    path = faces(tmp_path / "a.rec", 200)
    dataset = RecordIODataset(path)
    os.truncate(path, 4096)
    with pytest.raises(UnreadableSampleError, match="was .* bytes and is 4096 now"):
        dataset[150]


@pytest.mark.parametrize(
    ("idx", "reason"),
    [
        (b"", "empty"),
        (b"0\t0\n1\tx\n", "line 2"),
        (b"0\t0\n1 5000\n", "line 2"),
        (b"0 0\t\n", "line 1"),
        (b"\t5\n", "line 1"),
        (b"0\t0\n0\t700\n", "key 0 twice"),
        (b"0\t0\n1\t99999999\n", "cut short"),
        (b"0\t8\n", "does not fit"),
        (b"0\t0\n", "does not fit"),
        (b"0\t" + b"9" * 50, "cut short"),
        (b"\x80\x04}q\x00.", "line 1"),
    ],
)
def test_index_that_does_not_fit_is_refused(tmp_path, idx, reason):
    path = faces(tmp_path / "a.rec")
    path.with_suffix(".idx").write_bytes(idx)
    with pytest.raises(RequestError, match=reason) as caught:
        RecordIODataset(path)
    assert str(tmp_path / "a") in str(caught.value)


def test_empty_and_missing_files_are_refused(tmp_path):
    (tmp_path / "a.rec").touch()
    with pytest.raises(RequestError, match="empty"):
        RecordIODataset(tmp_path / "a.rec")
    with pytest.raises(RequestError, match="no file"):
        RecordIODataset(tmp_path / "b.rec")
    with pytest.raises(RequestError, match="no file .*train.rec"):
        RecordIODataset(tmp_path)


def test_range_of_images_that_the_index_lacks_is_refused(tmp_path):
    header = image_record([50.0, 60.0], 0, b"")
    path = write(tmp_path / "a.rec", [header, image_record([0.0], 1, jpeg(8, 8))])
    with pytest.raises(RequestError, match="1 to 49"):
        RecordIODataset(path)


def test_absurd_label_makes_no_absurd_model(tmp_path):
    path = faces(tmp_path / "a.rec")
    damage(path, begin_of(path, 5) + 12, struct.pack("<f", 1e6))
    with pytest.raises(RequestError, match="recordio.num_classes 1000001"):
        source(path)
    flags = ("--recordio.num_classes=12", "--max_bad_samples=1")
    loader = source(path, *flags).train_loader()
    assert len(list(loader)) == 3
    assert loader.num_bad_samples == 1


@settings(max_examples=400, deadline=None)
@given(st.integers(min_value=0))
def test_damaged_at_random_ends_in_named_errors(tmp_path_factory, seed):
    recordio_fuzz.one(seed, tmp_path_factory.mktemp("fuzz"))


# As a source


def test_trains_from_a_folder_of_files(tmp_path, monkeypatch):
    faces(tmp_path / "train.rec", 12)
    faces(tmp_path / "val.rec", 5)
    result = run(*TINY, f"--data=recordio:{tmp_path}", f"--output_dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    assert end_of(tmp_path / "run").num_samples > 0


def test_wrong_location_is_refused_before_any_worker_starts(tmp_path):
    for where in ("", f":{tmp_path / 'nowhere'}"):
        result = run(*TINY, f"--data=recordio{where}")
        assert result.returncode == 2
        assert result.stderr.count("\n") == 1


def test_train_and_val_of_different_classes_are_refused(tmp_path):
    for split in ("train", "val"):
        faces(tmp_path / f"{split}.rec")
    (tmp_path / "train.classes.txt").write_bytes(b"cat\nd\xf6g\nemu\n")
    source(tmp_path)  # the other has no names to compare
    for names, said in (
        (b"cat\nemu\n", r"1 is 'd\\udcf6g' in the one and 'emu' in the other"),
        (b"cat\nd\xf6g\n", "2 is 'emu' in the one and missing in the other"),
    ):
        (tmp_path / "val.classes.txt").write_bytes(names)
        with pytest.raises(RequestError, match=said):
            source(tmp_path)
    shutil.copy(tmp_path / "train.classes.txt", tmp_path / "val.classes.txt")
    source(tmp_path)


def test_loader_gives_whole_faces_of_the_right_label(tmp_path):
    path = faces(tmp_path / "train.rec", 12)
    loader = source(path, "--recordio.augment=flip").train_loader()
    for images_NCHW, labels_N in loader:
        assert images_NCHW.shape == (4, 3, 32, 32)
        assert (images_NCHW[:, 0, 16, 16] - 10 * labels_N).abs().max() <= 2


@pytest.fixture(scope="module")
def python_with_mxnet(tmp_path_factory) -> Path:
    """mxnet 1.9.1, the last, imports with no NumPy after 1.23.5: an environment of its own."""
    if sys.version_info >= (3, 12):
        pytest.skip("NumPy 1.23.5, which mxnet needs, does not install on Python 3.12")
    uv = shutil.which("uv") or shutil.which("uv", path=Path(sys.executable).parent)
    if uv is None:
        pytest.skip("no uv to make an environment for mxnet with")
    environment = tmp_path_factory.mktemp("mxnet") / "env"
    python = environment / "bin" / "python"
    for command in (
        [uv, "venv", "--quiet", "--python", sys.executable, environment],
        [uv, "pip", "install", "--quiet", "--python", python, "mxnet==1.9.1", "numpy==1.23.5"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
        if done.returncode:
            pytest.skip(f"cannot install mxnet: {' '.join(done.stderr.split())}")
    return python


def test_mxnet_reads_what_the_writer_wrote(tmp_path, python_with_mxnet):
    random_ = random.Random(0)
    payloads = []
    for _ in range(50):
        payload = random_.randbytes(random_.randint(0, 3000))
        for _ in range(random_.randint(0, 4)):
            cut = random_.randint(0, len(payload))
            payload = payload[:cut] + MAGIC * random_.randint(1, 3) + payload[cut:]
        payloads.append(payload)
    labels = [[float(i)] if i % 3 else [float(i), 2.0] for i in range(50)]
    records = [image_record(labels[i], i, payload) for i, payload in enumerate(payloads)]
    path = write(tmp_path / "a.rec", records)
    script = f"""
import hashlib, json, numpy
numpy.bool = bool  # mxnet 1.9.1 wants the name that NumPy 1.24 dropped
import mxnet
file = mxnet.recordio.MXIndexedRecordIO({str(path.with_suffix(".idx"))!r}, {str(path)!r}, "r")
for key in file.keys:
    header, payload = mxnet.recordio.unpack(file.read_idx(key))
    labels = numpy.atleast_1d(header.label).tolist()
    print(json.dumps([labels, header.id, hashlib.sha256(payload).hexdigest()]))
"""
    result = subprocess.run(
        [python_with_mxnet, "-c", script], capture_output=True, text=True, timeout=HANG_S
    )
    read = [json.loads(line) for line in result.stdout.splitlines()]
    assert read == [
        [labels[i], i, hashlib.sha256(payload).hexdigest()] for i, payload in enumerate(payloads)
    ], result.stderr


def test_loader_resumes_inside_an_epoch_with_other_ranks(tmp_path):
    faces(tmp_path / "train.rec", 24)

    def loader(rank: int, world_size: int):
        arguments = [*TINY, f"--data=recordio:{tmp_path}", "--recordio.augment=flip"]
        task = resolving.resolve(config.parse(arguments))
        topology = Topology(rank=rank, world_size=world_size)
        options = task.options["recordio"]
        made = plugins.load("data", "recordio")(str(tmp_path), task, options, topology)
        found = made.train_loader()
        found.set_epoch(2)
        return found

    def labels(batches) -> list[int]:
        return [label for _, labels_N in batches for label in labels_N.tolist()]

    whole = labels(loader(0, 1))
    ranks = [loader(rank, 2) for rank in range(2)]
    begun = [labels(itertools.islice(one, 2)) for one in ranks]
    states = [one.state_dict(num_batches=2) for one in ranks]
    assert states[0] == states[1]
    alone = loader(0, 1)
    alone.load_state_dict(states[0])
    assert len(alone) == 2
    rest = labels(alone)
    assert sorted([*begun[0], *begun[1], *rest]) == list(range(24))
    assert rest == whole[16:]
    again = loader(0, 1)
    again.load_state_dict(loader(0, 1).state_dict(num_batches=4))
    assert labels(again) == whole[16:]
    alone.set_epoch(3)
    assert len(labels(alone)) == 24
