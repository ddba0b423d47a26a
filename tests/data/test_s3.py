"""Images in a bucket: on moto's S3 server, and on one that fails on purpose."""

import errno
import multiprocessing
import os
import pickle
import tempfile
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from accbench import config, resolving
from accbench.config import plugins
from accbench.data import decode
from accbench.data.convert import convert
from accbench.data.recordio import RecordIODataset
from accbench.data.s3 import S3ImageFolder, bucket_and_prefix
from accbench.data.s3 import bucket as s3_bucket
from accbench.data.s3.cache import BoundedCache
from accbench.data.sources.imagefolder import ReadableImages
from accbench.distributed.process_group import Topology
from accbench.errors import BadSampleError, RequestError, UnreadableSampleError
from tests.conftest import HANG_S, TINY, end_of, run, small_disk
from tests.data.faulty_s3 import STALL_S, serving
from tests.data.pictures import jpeg

moto_server = pytest.importorskip("moto.server")


@pytest.fixture(autouse=True)
def _credentials(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def endpoint():
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def client(endpoint: str):
    import boto3

    return boto3.client("s3", endpoint_url=endpoint)


@pytest.fixture
def bucket(endpoint, request):
    """A bucket with 3 classes of 4 images to train and 1 to validate, not public."""
    s3 = client(endpoint)
    name = f"b{abs(hash(request.node.name)) % 10**9}"
    s3.create_bucket(Bucket=name)
    for label in range(3):
        for split, count in (("train", 4), ("val", 1)):
            for index in range(count):
                body = jpeg(32, 32, 40 * label + 10 * index)
                s3.put_object(Bucket=name, Key=f"set/{split}/class{label}/{index}.jpg", Body=body)
    s3.put_object(Bucket=name, Key="set/readme.txt", Body=b"no image")
    return name


def images(endpoint, bucket, tmp_path, prefix="set/train", **arguments) -> S3ImageFolder:
    return S3ImageFolder(
        bucket, prefix, endpoint_url=endpoint, cache_dir=tmp_path / "cache", **arguments
    )


def objects(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache/objects").glob("*/*") if path.suffix != ".part"]


def test_class_is_the_keys_folder(endpoint, bucket, tmp_path):
    found = images(endpoint, bucket, tmp_path)
    assert found.classes == ["class0", "class1", "class2"]
    assert len(found) == 12
    assert [found[index][1] for index in range(12)] == [0] * 4 + [1] * 4 + [2] * 4
    assert all(
        abs(int(found[i][0][0, 0, 0]) - (40 * (i // 4) + 10 * (i % 4))) < 3 for i in range(12)
    )
    assert images(endpoint, bucket, tmp_path, transform=lambda image: image.size)[0][0] == (32, 32)


FOLDERS = {
    "a/1.jpg": "a",
    "a/deep/er/2.jpg": "a",  # nested: of the first folder
    "a/c/3.JPG": "a",
    "a/.4.jpg": "a",  # hidden files and folders are as any other
    ".hidden/5.jpg": ".hidden",
    "a-b/6.png": "a-b",
    "\N{LATIN SMALL LETTER E WITH ACUTE}/7.jpg": "\N{LATIN SMALL LETTER E WITH ACUTE}",
    "c/d/8.jpg": "c",  # the folder itself has no file
    "9.jpg": None,  # loose, as is the next one
    "readme.txt": None,
    "a/readme.txt": None,
}


def put_on_disk(folder: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        path = folder / name
        (path if name[-1] == "/" else path.parent).mkdir(parents=True, exist_ok=True)
        if name[-1] != "/":
            path.write_bytes(jpeg(8, 8, number))


def put_in_bucket(endpoint: str, name: str, names: list[str]) -> None:
    s3 = client(endpoint)
    s3.create_bucket(Bucket=name)
    for number, key in enumerate(names):
        s3.put_object(Bucket=name, Key=key, Body=b"" if key[-1] == "/" else jpeg(8, 8, number))


def test_classes_are_those_of_the_same_folders_on_a_disk(endpoint, tmp_path):
    """For torchvision's ImageFolder, ours, a converted file and the bucket."""
    put_on_disk(tmp_path / "set/train", list(FOLDERS))
    put_in_bucket(endpoint, "folders", [f"set/train/{name}" for name in FOLDERS])
    convert(tmp_path / "set/train", tmp_path / "out.rec")

    torchvisions = ImageFolder(str(tmp_path / "set/train"))
    expected = {
        (tmp_path / "set/train" / name).read_bytes(): of_class
        for name, of_class in FOLDERS.items()
        if of_class is not None
    }
    classes = torchvisions.classes
    assert classes == sorted({*expected.values()})
    found = {Path(path).read_bytes(): classes[label] for path, label in torchvisions.samples}
    assert found == expected

    ours = ReadableImages(tmp_path / "set/train", decode.WholeView(8))
    assert (ours.classes, ours.samples) == (classes, torchvisions.samples)

    packed = RecordIODataset(tmp_path / "out.rec")
    assert (tmp_path / "out.classes.txt").read_text().splitlines() == classes
    records = [packed.record(index) for index in range(len(packed))]
    assert {bytes(r.payload): classes[int(r.label)] for r in records} == expected

    for in_bucket in (
        images(endpoint, "folders", tmp_path),
        images(endpoint, "folders", tmp_path, "set", allow_empty=True).subfolder("train"),
    ):
        assert in_bucket.classes == classes
        everything = range(len(in_bucket))
        labels = {in_bucket.encoded(i): classes[in_bucket.label(i)] for i in everything}
        assert labels == expected


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a/1.jpg", "b/"], r"\bb\b"),
        (["a/1.jpg", ".ipynb_checkpoints/"], r"\.ipynb_checkpoints"),
        (["a/1.jpg", "b/readme.txt"], r"\bb\b"),
        (["a/1.jpg", "b/deep/"], r"\bb\b"),
        (["1.jpg", "2.jpg"], "folder"),
    ],
)
def test_folders_without_an_image_are_refused_in_a_bucket_as_on_a_disk(
    endpoint, tmp_path, names, said, request
):
    put_on_disk(tmp_path / "set", names)
    bucket = f"empty{abs(hash(request.node.name)) % 10**9}"
    put_in_bucket(endpoint, bucket, [f"set/{name}" for name in names])
    with pytest.raises(RequestError, match=said):
        ReadableImages(tmp_path / "set", decode.WholeView(8))
    with pytest.raises(RequestError, match=said):
        convert(tmp_path / "set", tmp_path / "out.rec")
    with pytest.raises(RequestError, match=said):
        images(endpoint, bucket, tmp_path, "set")


def test_size_of_what_is_no_image_names_the_key(endpoint, bucket, tmp_path):
    client(endpoint).put_object(Bucket=bucket, Key="set/train/class0/0.jpg", Body=b"no image")
    found = images(endpoint, bucket, tmp_path)
    assert found.get_img_info(1) == {"height": 32, "width": 32}
    with pytest.raises(UnreadableSampleError, match=f"s3://{bucket}/set/train/class0/0.jpg: "):
        found.get_img_info(0)


def source(endpoint: str, bucket: str, tmp_path: Path):
    flags = [f"--s3.endpoint_url={endpoint}", f"--s3.cache_dir={tmp_path / 'cache'}"]
    task = resolving.resolve(config.parse([*TINY, f"--data=s3://{bucket}/set", *flags]))
    return plugins.load("data", "s3")(task.data, task, task.options["s3"], Topology())


def test_train_and_val_below_the_prefix_or_classes(endpoint, tmp_path):
    put_in_bucket(endpoint, "split", [
        "set/1.jpg", "set/labels/names.txt", "set/train/0.jpg", "set/train/a/1.jpg",
        "set/train/b/x/1.jpg", "set/val/a/x/3.jpg", "set/val/b/4.jpg", "set/val/5.jpg",
    ])  # fmt: skip
    split = source(endpoint, "split", tmp_path)
    assert (split.train_set.classes, len(split.train_set)) == (["a", "b"], 2)
    assert (split.eval_set.classes, len(split.eval_set)) == (["a", "b"], 2)
    put_in_bucket(endpoint, "classes", ["set/train/1.jpg", "set/val/2.jpg", "set/zoo/3.jpg"])
    found = source(endpoint, "classes", tmp_path)  # classes that happen to be called so
    assert (found.train_set.classes, found.eval_set) == (["train", "val", "zoo"], None)
    put_in_bucket(endpoint, "loose", ["set/train/a/1.jpg", "set/val/2.jpg"])
    with pytest.raises(RequestError, match="no image in a folder below s3://loose/set/val/"):
        source(endpoint, "loose", tmp_path)


def test_signed_and_anonymous(endpoint, bucket, tmp_path, monkeypatch):
    s3 = client(endpoint)
    s3.create_bucket(Bucket=f"{bucket}-public", ACL="public-read")
    s3.put_object(Bucket=f"{bucket}-public", Key="a/1.jpg", Body=jpeg(8, 8), ACL="public-read")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    public = images(endpoint, f"{bucket}-public", tmp_path, prefix="", anonymous=True)
    assert public[0][0].shape == (3, 8, 8)


def test_listing_is_paged_and_cached(endpoint, bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "5")
    s3 = client(endpoint)
    for index in range(23):
        s3.put_object(Bucket=bucket, Key=f"many/c{index % 2}/{index:04d}.jpg", Body=b"x")
    assert s3.list_objects_v2(Bucket=bucket, Prefix="many/")["IsTruncated"]
    found = images(endpoint, bucket, tmp_path, prefix="many")
    assert len(found) == 23
    assert len({found.key(index) for index in range(23)}) == 23
    s3.put_object(Bucket=bucket, Key="many/c0/new.jpg", Body=b"x")
    assert len(images(endpoint, bucket, tmp_path, prefix="many")) == 23
    assert len(images(endpoint, bucket, tmp_path, prefix="many", listing_max_age_s=0)) == 24


def test_second_reading_asks_the_cache(tmp_path):
    with serving({"set/a/0.jpg": 0, "set/b/1.jpg": 0}) as server:
        for _ in range(2):
            found = images(server.url, "bucket", tmp_path, "set", anonymous=True)
            assert [label for _, label in (found[0], found[1])] == [0, 1]
        assert server.requests == {"": 1, "set/a/0.jpg": 1, "set/b/1.jpg": 1}


def test_object_that_was_replaced_is_fetched_anew(endpoint, bucket, tmp_path):
    before = images(endpoint, bucket, tmp_path)[0][0]
    client(endpoint).put_object(Bucket=bucket, Key="set/train/class0/0.jpg", Body=jpeg(32, 32, 200))
    after = images(endpoint, bucket, tmp_path, listing_max_age_s=0)[0][0]
    assert not torch.equal(before, after)


def test_worker_processes_read_the_same(endpoint, bucket, tmp_path):
    found = images(endpoint, bucket, tmp_path)
    alone = [int(found[0][0].long().sum()), int(found[11][0].long().sum())]
    cold = S3ImageFolder(bucket, "set/train", endpoint_url=endpoint, cache_dir=tmp_path / "cold")
    cold[5]  # a connection before the fork must not be used after it
    assert torch.equal(pickle.loads(pickle.dumps(cold))[0][0], found[0][0])
    loader = DataLoader(cold, batch_size=4, num_workers=2, multiprocessing_context="fork")
    images_ = torch.cat([batch for batch, _ in loader])
    assert [int(images_[0].long().sum()), int(images_[11].long().sum())] == alone


def test_trains_from_a_bucket(endpoint, bucket, tmp_path):
    result = run(
        *TINY, f"--data=s3://{bucket}/set", f"--s3.endpoint_url={endpoint}",
        f"--output_dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert end_of(tmp_path / "run").num_samples > 0
    assert (tmp_path / "home/accbench/s3/objects").is_dir()


def test_url_that_is_none(tmp_path):
    assert bucket_and_prefix("s3://b/a/c/") == ("b", "a/c/")
    assert bucket_and_prefix("s3://b") == ("b", "")
    for url in (None, "s3:///x", "s3://b/x?y=1", "s3:x"):
        with pytest.raises(RequestError, match="s3://BUCKET/PREFIX"):
            bucket_and_prefix(url)


def test_nothing_there(endpoint, bucket, tmp_path):
    with pytest.raises(RequestError, match="no image"):
        images(endpoint, bucket, tmp_path, prefix="nowhere")
    with pytest.raises(RequestError, match="404|NoSuchBucket"):
        images(endpoint, "no-such-bucket", tmp_path)


# Faults


def faulty(server, tmp_path, **arguments) -> S3ImageFolder:
    return images(server.url, "bucket", tmp_path, "set", anonymous=True, **arguments)


@pytest.fixture
def no_pause(monkeypatch):
    monkeypatch.setattr(s3_bucket, "_BACKOFF_S", 0.01)


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize(
    ("answer", "reason", "attempts"),
    [
        (403, "403", 1),
        (404, "404", 1),
        (500, "500.*3 attempts", 3),
        ("short", "[Pp]ayload|body", 1),
    ],
)
def test_failing_object_is_named_and_only_5xx_is_tried_again(tmp_path, answer, reason, attempts):
    with serving({"set/a/0.jpg": answer, "set/a/1.jpg": 0}) as server:
        found = faulty(server, tmp_path, attempts=3)
        with pytest.raises(UnreadableSampleError, match=reason) as caught:
            found[0]
        assert "s3://bucket/set/a/0.jpg" in str(caught.value)
        assert server.requests["set/a/0.jpg"] == attempts
        assert found[1][1] == 0
        assert len(objects(tmp_path)) == 1  # nothing half is kept


@pytest.mark.usefixtures("no_pause")
def test_passing_failure_is_overcome(tmp_path):
    with serving({"set/a/0.jpg": 2}) as server:
        assert faulty(server, tmp_path)[0][1] == 0
        assert server.requests["set/a/0.jpg"] == 3


@pytest.mark.usefixtures("no_pause")
def test_server_that_stalls_is_given_up(tmp_path):
    with serving({"set/a/0.jpg": "stall"}) as server:
        found = faulty(server, tmp_path, attempts=2, timeout_s=2)
        begun = time.monotonic()
        with pytest.raises(UnreadableSampleError, match=r"[Tt]imeout.*2 attempts") as caught:
            found[0]
        assert time.monotonic() - begun < STALL_S  # or it was the server that gave up
        assert "s3://bucket/set/a/0.jpg" in str(caught.value)
        assert server.requests["set/a/0.jpg"] == 2


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("status", [403, 500])
def test_bucket_that_cannot_be_listed(tmp_path, status):
    with serving({"set/a/0.jpg": 0}) as server:
        server.listing_status = status
        with pytest.raises(RequestError, match=f"cannot list s3://bucket/set/.*{status}"):
            faulty(server, tmp_path, attempts=2)


def train_loader(server, *flags: str):
    arguments = [*TINY, "--data=s3://bucket/set", f"--s3.endpoint_url={server.url}"]
    task = resolving.resolve(config.parse([*arguments, "--s3.anonymous", *flags]))
    source = plugins.load("data", "s3")
    return source(task.data, task, task.options["s3"], Topology()).train_loader()


def test_bad_objects_count_against_the_budget(tmp_path):
    answers = {f"set/c{i % 2}/{i}.jpg": 404 if i == 3 else 0 for i in range(8)}
    with serving(answers) as server:
        with pytest.raises(BadSampleError, match=r"s3://bucket/set/c1/3.jpg"):
            list(train_loader(server))
        server.requests.clear()
        lenient = train_loader(server, "--max_bad_samples=1")
        assert len(list(lenient)) == 2
        assert lenient.num_bad_samples == 1
        assert max(server.requests.values()) == 1  # what failed is not asked for again


def test_training_fetches_the_objects_of_a_batch_together(tmp_path):
    with serving({f"set/c{i % 2}/{i}.jpg": "together" for i in range(8)}) as server:
        flags = ("--s3.cache_gib=0", "--s3.attempts=1")
        batches = list(train_loader(server, *flags, "--batch_size=4"))
        assert server.requests == {"": 1, **dict.fromkeys(server.answers, 1)}
        server.answers = dict.fromkeys(server.answers, 0)
        singles = list(train_loader(server, *flags, "--batch_size=1"))
    for part in range(2):  # images, labels
        together, apart = (torch.cat([batch[part] for batch in of]) for of in (batches, singles))
        assert torch.equal(together, apart)


# The cache


def total(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "objects").rglob("*") if path.is_file())


def test_cache_is_bounded_and_keeps_what_was_used_last(tmp_path):
    cache = BoundedCache(tmp_path, 10_000)
    for number in range(50):
        cache.put(f"key{number}", bytes(1000))
        time.sleep(0.002)
        assert cache.get("key0", 1000) is not None
        assert total(tmp_path) <= 10_000
    assert cache.get("key49", 1000) is not None
    assert cache.get("key1", 1000) is None
    cache.put("large", bytes(20_000))
    assert cache.get("large", 20_000) is None
    BoundedCache(tmp_path / "none", 0).put("a", b"a")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "key", ["../../escape", "/etc/escape", "a/../../../escape", "..", "\0", "é\n"]
)
def test_no_key_leads_outside_the_folder(tmp_path, key):
    folder = tmp_path / "cache"
    cache = BoundedCache(folder, 1000)
    cache.put(key, b"content")
    assert cache.get(key, 7) == b"content"
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert {path.parent.parent for path in folder.rglob("*") if path.stat().st_size == 7} == {
        folder / "objects"
    }


def test_damaged_entry_is_fetched_anew(tmp_path):
    cache = BoundedCache(tmp_path, 1000)
    cache.put("a", b"content")
    (entry,) = (tmp_path / "objects").glob("*/*")
    entry.write_bytes(b"cont")
    assert cache.get("a", 7) is None


def test_full_disk_is_no_error(tmp_path, monkeypatch):
    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with serving({"set/a/0.jpg": 0}) as server:
        found = faulty(server, tmp_path)
        monkeypatch.setattr(tempfile, "NamedTemporaryFile", full)
        with pytest.warns(UserWarning, match="No space left.*going on without"):
            assert found[0][1] == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert found[0][1] == 0  # said once
        assert server.requests["set/a/0.jpg"] == 2


def test_disk_that_is_really_full(tmp_path):
    folder = tmp_path / "small"
    with small_disk(folder, "64k"):
        cache = BoundedCache(folder, 10**9)
        for number in range(4):
            cache.put(f"key{number}", bytes(10_000))
        with pytest.warns(UserWarning, match="No space left"):
            cache.put("too much", bytes(40_000))
        assert cache.get("key0", 10_000) is not None
        assert not list(folder.rglob("*.part"))


def put_many(folder: Path, first: int) -> None:
    cache = BoundedCache(folder, 20_000)
    for number in range(300):
        name = f"key{(first + number) % 40}"
        found = cache.get(name, 1000)
        assert found in (None, name.encode().ljust(1000))
        cache.put(name, name.encode().ljust(1000))


def test_two_processes_share_a_cache(tmp_path):
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=put_many, args=(tmp_path, first)) for first in (0, 20)]
    for process in both:
        process.start()
    for process in both:
        process.join(HANG_S)
    assert [process.exitcode for process in both] == [0, 0]
    assert total(tmp_path) <= 20_000 * (1 + 2 / 64) + 1000
    assert not list(tmp_path.rglob("*.part"))


def test_part_files_of_killed_processes_go(tmp_path):
    cache = BoundedCache(tmp_path, 2000)
    cache.put("a", bytes(500))
    (entry,) = (tmp_path / "objects").glob("*/*")
    stale, fresh = entry.with_name("x.part"), entry.with_name("y.part")
    for part in (stale, fresh):
        part.touch()
    os.utime(stale, (1, 1))
    cache.put("b", bytes(500))
    assert not stale.exists()
    assert fresh.exists()
