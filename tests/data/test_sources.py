"""Real JPEG files to batches."""

import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from accbench import config, resolving
from accbench.config import plugins
from accbench.data import PADDING_LABEL
from accbench.distributed.process_group import Topology
from accbench.errors import BadSampleError, RequestError, UnreadableSampleError
from accbench.recording import records
from tests import nets
from tests.conftest import TINY, end_of, of_kind, run

ALONE = Topology()


def source(folder, topology=ALONE, *flags):
    task = resolving.resolve(config.parse([*TINY, f"--data=imagefolder:{folder}", *flags]))
    return plugins.load("data", "imagefolder")(str(folder), task, None, topology)


def shards(world_size: int) -> list[Topology]:
    return [Topology(rank=rank, world_size=world_size) for rank in range(world_size)]


@pytest.fixture
def numbered(tmp_path):
    """Images whose pixels tell their number: 2 classes, 10 to train, 5 to validate each."""
    for split, count in (("train", 10), ("val", 5)):
        for label in range(2):
            folder = tmp_path / split / f"class{label}"
            folder.mkdir(parents=True)
            for index in range(count):
                value = 10 + 20 * (label * count + index) // 2
                pixels = np.full((40, 48, 3), value, np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.png")
    return tmp_path


def values(batches) -> list[int]:
    """The first pixel of every image that is not padding."""
    return [
        int(image[0, 0, 0])
        for images, labels in batches
        for image, label in zip(images, labels, strict=True)
        if label != PADDING_LABEL
    ]


def test_batches_are_uint8_channels_last(images):
    loader = source(images).train_loader()
    batches = list(loader)
    assert len(batches) == len(loader) == 48 // 4
    for images_NCHW, labels_N in batches:
        assert images_NCHW.shape == (4, 3, 32, 32)
        assert images_NCHW.dtype == torch.uint8
        assert images_NCHW.is_contiguous(memory_format=torch.channels_last)
        assert labels_N.shape == (4,)


def test_ranks_share_an_epoch_without_overlap(numbered):
    seen = [values(source(numbered, shard, "--batch_size=5").train_loader()) for shard in shards(2)]
    assert [len(of_rank) for of_rank in seen] == [10, 10]
    assert len({*seen[0], *seen[1]}) == 20


def test_epochs_are_shuffled_anew_and_alike_on_all_ranks(numbered):
    loader = source(numbered).train_loader()
    orders = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        orders.append(values(loader))
    assert orders[0] == orders[2] != orders[1]


def test_augmentation_follows_from_seed_epoch_and_sample_alone(images):
    """Whichever rank or process reads a sample, and whatever it has read before."""

    def views(num_ranks: int, seed: int, epoch: int, *flags: str) -> list[int]:
        found = []
        for rank in range(num_ranks):
            shard = Topology(rank=rank, world_size=num_ranks)
            loader = source(images, shard, f"--seed={seed}", *flags).train_loader()
            loader.set_epoch(epoch)
            found += [int(image.long().sum()) for batch, _ in loader for image in batch]
        return sorted(found)

    alone = views(1, 1, 0)
    assert len(alone) == 48
    assert views(2, 1, 0) == views(1, 1, 0, "--workers=2") == alone
    assert len(set(alone) & set(views(1, 1, 1))) < 5
    assert len(set(alone) & set(views(1, 2, 0))) < 5


def test_last_short_batch_is_dropped_in_training_alone(numbered):
    train = list(source(numbered, ALONE, "--batch_size=8").train_loader())
    assert [len(labels) for _, labels in train] == [8, 8]
    evaluated = list(source(numbered, ALONE, "--batch_size=8").eval_loader())
    assert [len(labels) for _, labels in evaluated] == [8, 8]  # one shape, the second padded
    assert len(values(evaluated)) == 10


def test_every_validation_image_counts_once_over_ranks(numbered):
    seen = [v for shard in shards(3) for v in values(source(numbered, shard).eval_loader())]
    assert len(seen) == len(set(seen)) == 10


def test_no_padding_counts_in_a_loss_that_cannot_tell_it(numbered):
    spec = nets.Recolours()
    net = spec.build(2)
    for num_ranks, batch_size in ((1, 5), (1, 8), (3, 4)):
        flags = ("--model=tests.nets:Recolours", f"--batch_size={batch_size}")
        loaders = [source(numbered, shard, *flags).eval_loader() for shard in shards(num_ranks)]
        scores = [spec.score(net, batch).detach() for loader in loaders for batch in loader]
        loss, _, _, num_samples = sum(scores).tolist()
        assert num_samples == 10
        if batch_size == 5:  # full batches alone
            expected = loss
        assert loss == pytest.approx(expected, rel=1e-5)


def test_eval_takes_the_centre(tmp_path):
    for split in ("train", "val"):
        folder = tmp_path / split / "a"
        folder.mkdir(parents=True)
        pixels = np.zeros((224, 448, 3), np.uint8)
        pixels[:, 112:336] = 200  # the middle half
        for index in range(4):
            Image.fromarray(pixels).save(folder / f"{index}.png")
    (images_NCHW, _), *_ = source(tmp_path, ALONE, "--image_size=112").eval_loader()
    # The shorter side goes to 128, so the middle 112 of 256 columns are all bright.
    assert images_NCHW.min() > 190


def test_worker_processes_give_what_one_process_gives(numbered):
    flags = ("--workers=2", "--batch_size=5")
    assert sorted(values(source(numbered, ALONE, *flags).train_loader())) == sorted(
        values(source(numbered).train_loader())
    )


def damaged(images, tmp_path, num_bad: int):
    """A copy of the mock images in which some cannot be read: cut short, or no image."""
    folder = tmp_path / "damaged"
    shutil.copytree(images, folder)
    files = sorted((folder / "train").rglob("*.jpg"))[:num_bad]
    for number, file in enumerate(files):
        file.write_bytes(file.read_bytes()[:2000] if number % 2 == 0 else b"GIF89a no more")
    return folder, files


def test_bad_image_is_named_with_its_path(images, tmp_path):
    folder, (file,) = damaged(images, tmp_path, 1)
    with pytest.raises(BadSampleError) as caught:
        list(source(folder).train_loader())
    assert str(file) in str(caught.value)
    assert "--max_bad_samples" in str(caught.value)


@pytest.mark.timeout(120)
def test_what_is_no_file_is_named_not_waited_for(images, tmp_path):
    folder = tmp_path / "images"
    shutil.copytree(images, folder)
    file = next((folder / "train").rglob("*.jpg"))
    file.unlink()
    os.mkfifo(file)
    train_set = source(folder).train_set
    index = [path for path, _ in train_set.samples].index(str(file))
    with pytest.raises(UnreadableSampleError) as caught:
        train_set.read(index)
    assert str(caught.value) == f"cannot read image {file}: not a regular file"


def test_bad_images_within_the_limit_are_replaced_and_counted(images, tmp_path):
    folder, files = damaged(images, tmp_path, 3)
    loader = source(folder, ALONE, "--max_bad_samples=3").train_loader()
    named: list[str] = []
    loader.problems = named.append
    assert len(list(loader)) == 12
    assert loader.num_bad_samples == 3
    assert all(any(str(file) in text for text in named) for file in files)
    with pytest.raises(BadSampleError):
        list(source(folder, ALONE, "--max_bad_samples=2").train_loader())


def test_bad_image_in_a_run(images, tmp_path):
    folder, (file,) = damaged(images, tmp_path, 1)
    flags = (*TINY, "--max_steps=100", f"--data=imagefolder:{folder}")
    strict = run(*flags, f"--output_dir={tmp_path / 'strict'}")
    assert strict.returncode == 1
    assert str(file) in strict.stderr.splitlines()[-1]
    assert end_of(tmp_path / "strict").status == "error"
    lenient = run(*flags, f"--output_dir={tmp_path / 'lenient'}", "--max_bad_samples=1")
    assert lenient.returncode == 0, lenient.stderr
    assert str(file) in lenient.stdout
    end = end_of(tmp_path / "lenient")
    assert (end.status, end.num_bad_samples, end.num_steps) == ("ok", 1, 12)
    (scores,) = of_kind(tmp_path / "lenient", records.EvalRecord)
    assert scores.num_samples == 12


def test_class_without_images_is_named(numbered):
    (numbered / "train" / "class2").mkdir()
    with pytest.raises(RequestError, match="class2"):
        source(numbered)


def test_different_classes_in_train_and_val(numbered):
    (numbered / "val" / "class1").rename(numbered / "val" / "other")
    with pytest.raises(RequestError, match="different classes"):
        source(numbered)


def test_synthetic_batches_stay_on_the_device():
    task = resolving.resolve(config.parse([*TINY, "--data=synthetic"]))
    options = task.options["synthetic"]
    loader = plugins.load("data", "synthetic")(None, task, options, Topology()).train_loader()
    engine = plugins.load("engines", "ddp")(task, task.options["ddp"], Topology())
    batches = list(engine.device_batches(loader))
    assert len(batches) == len(loader) == 100
    assert len({images.data_ptr() for images, _ in batches}) == options.num_batches
