"""COCO's files to batches of images and boxes."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from accbench import config, resolving
from accbench.config import plugins
from accbench.distributed.process_group import Topology
from accbench.errors import BadSampleError, RequestError, UnreadableSampleError
from accbench.recording import records
from tests.conftest import TINY, end_of, of_kind, run

SIZE = 48
WIDE, UPRIGHT = (SIZE, 64), (64, SIZE)
# Category ids with gaps, as COCO's are, and not in order.
CATEGORIES = [{"id": 7, "name": "red"}, {"id": 3, "name": "green"}]
COLOURS = {7: (250, 0, 0), 3: (0, 250, 0)}
LABELS = {7: 2, 3: 1}
DETECTOR = "--model=torchvision:fasterrcnn_mobilenet_v3_large_320_fpn"


def source(folder, *flags, topology=Topology()):  # noqa: B008
    task = resolving.resolve(
        config.parse(
            [*TINY, DETECTOR, f"--image_size={SIZE}", f"--data=coco:{folder}", "--batch_size=2",
             *flags]
        )
    )  # fmt: skip
    return plugins.load("data", "coco")(str(folder), task, task.options["coco"], topology)


def written(folder, split: str, sizes: list[tuple[int, int]], more=()) -> None:
    """Images (height, width) with a box of a colour each, number k a quarter k % 4 of it."""
    images, annotations = [], [*more]
    (folder / split).mkdir(parents=True)
    (folder / "annotations").mkdir(exist_ok=True)
    for index, (height, width) in enumerate(sizes):
        category = (7, 3)[index % 2]
        left, top = width // 2 * (index % 2), height // 2 * (index // 2 % 2)
        pixels = np.full((height, width, 3), 60 + 5 * index, np.uint8)  # no two alike
        pixels[top : top + height // 2, left : left + width // 2] = COLOURS[category]
        name = f"{index:03}.png"
        Image.fromarray(pixels).save(folder / split / name)
        # Ids count down: their order is that of samples, not the file's.
        images.append(
            {"id": 100 - index, "file_name": name, "height": height, "width": width}
        )  # fmt: skip
        annotations.append(
            {"id": index, "image_id": 100 - index, "category_id": category, "iscrowd": 0,
             "bbox": [left, top, width // 2, height // 2]}
        )  # fmt: skip
    content = {"images": images, "annotations": annotations, "categories": CATEGORIES}
    path = folder / "annotations" / f"instances_{split}.json"
    path.write_text(json.dumps(content))


@pytest.fixture
def coco(tmp_path):
    """Ten wide images, six upright ones; three and two to evaluate. Some are very long."""
    wide, upright = [(60, 80), (48, 90)] * 5, [(90, 60), (80, 80)] * 3
    written(tmp_path, "train2017", [*wide, *upright])
    written(tmp_path, "val2017", [(60, 80), (80, 60), (60, 80), (80, 60), (60, 80)])
    return tmp_path


def shapes(loader) -> list[tuple[int, ...]]:
    return [tuple(images.shape[2:]) for images, _ in loader]


def test_boxes_are_where_the_image_shows_them(coco):
    """Whatever its size, and mirrored or not."""
    seen = []
    loader = source(coco).train_loader()
    for epoch in range(3):
        loader.set_epoch(epoch)
        for images_NCHW, targets in loader:
            assert images_NCHW.dtype == torch.uint8
            assert images_NCHW.is_contiguous(memory_format=torch.channels_last)
            assert targets["boxes"].shape == (2, 1, 4)
            for image_CHW, box, label in zip(
                images_NCHW, targets["boxes"][:, 0], targets["labels"][:, 0], strict=True
            ):
                channel = 0 if label == LABELS[7] else 1
                others = image_CHW[[c for c in range(3) if c != channel]].amax(dim=0)
                rows, columns = ((image_CHW[channel] > 200) & (others < 50)).nonzero(as_tuple=True)
                found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
                torch.testing.assert_close(
                    torch.tensor([float(edge) for edge in found]), box, atol=2, rtol=0
                )
                seen.append(round(float(box[0])))
    assert len(set(seen)) > 2  # not all at the same place


def test_a_batch_has_one_shape_and_that_of_other_ranks(coco):
    """Upright images and others, of which what fills no batch of all ranks is left out."""
    loader = source(coco).train_loader()
    alone = shapes(loader)
    assert len(alone) == len(loader)
    assert sorted(alone) == [WIDE] * 5 + [UPRIGHT] * 3
    first, second = (
        shapes(source(coco, topology=Topology(rank=rank, world_size=2)).train_loader())
        for rank in range(2)
    )
    assert first == second
    assert sorted(first) == [WIDE] * 2 + [UPRIGHT]


def test_every_image_to_evaluate_comes_once(coco):
    for ranks in (1, 2, 3, 7):  # more than images, too
        num_images, found = 0, []
        for rank in range(ranks):
            loader = source(coco, topology=Topology(rank=rank, world_size=ranks)).eval_loader()
            for images_NCHW, targets in loader:
                assert (targets["labels"] != 0).any(dim=1).all()  # a detector's loss counts padding
                found.append(tuple(images_NCHW.shape[2:]))
                num_images += len(images_NCHW)
        assert num_images == 5
        assert set(found) == {WIDE, UPRIGHT}


@pytest.mark.parametrize("seed", range(4))
def test_epochs_go_on_with_another_number_of_ranks(coco, seed):
    """No image twice."""

    def shown(made, num_batches: int | None = None) -> tuple[list[bytes], dict]:
        loader, keys = made.train_loader(), []
        for number, (images_NCHW, _) in enumerate(loader):
            if number == num_batches:
                break
            keys += [image.numpy().tobytes() for image in images_NCHW]
        return keys, loader.state_dict(num_batches or len(loader))

    plain = ("--coco.augment=none", f"--seed={seed}")
    before, state = shown(source(coco, *plain), 3)
    after = []
    for rank in range(2):
        made = source(coco, *plain, topology=Topology(rank=rank, world_size=2))
        loader = made.train_loader()
        loader.load_state_dict(json.loads(json.dumps(state)))
        batches = list(loader)
        assert len(batches) == len(loader)
        after += [image.numpy().tobytes() for images, _ in batches for image in images]
    # Six of sixteen were seen; of ten left eight fill batches of two ranks, or fewer do.
    assert len(before) == 6
    assert 4 <= len(after) <= 8
    assert len({*before, *after}) == len(before) + len(after)


def test_another_batch_size_does_not_go_on_inside_an_epoch(coco):
    state = source(coco).train_loader().state_dict(1)
    with pytest.raises(ValueError, match="batch_size 2, but here it is 3"):
        source(coco, "--batch_size=3").train_loader().load_state_dict(state)


def test_square_images_are_stretched(coco):
    made = source(coco, "--coco.shape=square", "--coco.augment=none")
    (images_NCHW, targets), *_ = made.train_loader()
    assert images_NCHW.shape == (2, 3, SIZE, SIZE)
    sides = targets["boxes"][..., 2:] - targets["boxes"][..., :2]
    torch.testing.assert_close(sides, torch.full((2, 1, 2), SIZE / 2))


def test_what_counts_for_nothing_is_left_out(tmp_path):
    """Crowds, boxes without an inside, and images that have nothing else."""
    crowd = {"id": 90, "image_id": 100, "category_id": 3, "iscrowd": 1, "bbox": [0, 0, 60, 60]}
    line = {"id": 91, "image_id": 99, "category_id": 3, "iscrowd": 0, "bbox": [5, 5, 0, 30]}
    written(tmp_path, "train2017", [(60, 80)] * 3, (crowd, line))
    path = tmp_path / "annotations" / "instances_train2017.json"
    content = json.loads(path.read_text())
    content["annotations"] = [one for one in content["annotations"] if one["image_id"] != 99] + [
        line
    ]
    path.write_text(json.dumps(content))
    images = source(tmp_path).train_set
    assert images.names == ["002.png", "000.png"]
    assert images.most_objects == 1


def test_an_image_that_cannot_be_read_is_replaced_by_one_of_its_shape(coco):
    (coco / "train2017" / "010.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises((BadSampleError, UnreadableSampleError), match=r"010\.png"):
        list(source(coco).train_loader())
    loader = source(coco, "--max_bad_samples=3").train_loader()
    assert sorted(shapes(loader)) == [WIDE] * 5 + [UPRIGHT] * 3
    assert loader.num_bad_samples == 1
    Image.new("RGB", (30, 40)).save(coco / "train2017" / "010.png")
    with pytest.raises(BadSampleError, match="30 x 40 pixels, and its annotations are for 60 x 90"):
        list(source(coco).train_loader())


# How a picture is stored whose camera was held so: what undoes the turn that EXIF tells.
STORED = {
    1: lambda shown: shown,
    2: lambda shown: shown[:, ::-1],
    3: lambda shown: shown[::-1, ::-1],
    4: lambda shown: shown[::-1],
    5: lambda shown: shown.swapaxes(0, 1),
    6: lambda shown: np.rot90(shown),
    7: lambda shown: shown[::-1, ::-1].swapaxes(0, 1),
    8: lambda shown: np.rot90(shown, -1),
}


def photograph(folder, orientation: int, annotated: str, kind: str = "JPEG") -> None:
    """A picture with a red part at the top left, annotated as it is shown or as it is stored."""
    shown = np.full((240, 320, 3), 90, np.uint8)
    shown[16:64, 32:112] = COLOURS[7]
    stored = np.ascontiguousarray(STORED[orientation](shown))
    exif = Image.Exif()
    exif[0x0112] = orientation
    (folder / "train2017").mkdir(parents=True)
    (folder / "annotations").mkdir()
    Image.fromarray(stored).save(folder / "train2017/photo.jpg", kind, quality=95, exif=exif)
    seen = shown if annotated == "shown" else stored
    rows, columns = (seen[..., 0] == COLOURS[7][0]).nonzero()
    left, top = int(columns.min()), int(rows.min())
    box = [left, top, int(columns.max()) + 1 - left, int(rows.max()) + 1 - top]
    content = {
        "images": [
            {"id": 1, "file_name": "photo.jpg", "height": seen.shape[0], "width": seen.shape[1]}
        ],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 7, "bbox": box}],
        "categories": CATEGORIES,
    }
    (folder / "annotations/instances_train2017.json").write_text(json.dumps(content))


def box_is_where_the_image_shows_it(image_HWC: torch.Tensor, box: torch.Tensor) -> bool:
    others = image_HWC[..., 1:].amax(dim=2)
    rows, columns = ((image_HWC[..., 0] > 200) & (others < 60)).nonzero(as_tuple=True)
    found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    return torch.allclose(torch.tensor([float(edge) for edge in found]), box, atol=2, rtol=0)


@pytest.mark.parametrize("shape", ["aspect", "square"])
@pytest.mark.parametrize("annotated", ["shown", "stored"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_fit_photographs_that_exif_turns(tmp_path, orientation, annotated, shape):
    """Whichever picture was annotated; of one upside down a person has to say."""
    photograph(tmp_path, orientation, annotated)
    said = "--coco.exif=turn" if annotated == "shown" and orientation < 5 else "--coco.exif=auto"
    images = source(tmp_path, said, f"--coco.shape={shape}").train_set
    for _ in range(6):  # mirrored or not
        image_HWC, (boxes_M4, _) = images.read(0)
        assert box_is_where_the_image_shows_it(image_HWC, boxes_M4[0])
    upright = annotated == "stored" and orientation >= 5
    assert tuple(image_HWC.shape[:2]) == ((SIZE, SIZE) if shape == "square" else
                                          UPRIGHT if upright else WIDE)  # fmt: skip


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_other_formats_are_turned_once(tmp_path, kind):
    """Pillow turns TIFF by itself."""
    photograph(tmp_path, 6, "shown", kind)
    for exif in ("turn", "auto"):
        image_HWC, (boxes_M4, _) = source(tmp_path, f"--coco.exif={exif}").train_set.read(0)
        assert box_is_where_the_image_shows_it(image_HWC, boxes_M4[0])


def test_a_photograph_that_fits_its_annotations_neither_way_is_refused(tmp_path):
    photograph(tmp_path / "turned", 6, "shown")
    with pytest.raises(UnreadableSampleError, match="240 x 320 pixels, and its ann.* 320 x 240"):
        source(tmp_path / "turned", "--coco.exif=ignore").train_set.read(0)
    Image.new("RGB", (240, 320)).save(tmp_path / "turned/train2017/photo.jpg")  # without EXIF
    with pytest.raises(UnreadableSampleError, match="240 x 320 pixels, and its ann.* 320 x 240"):
        source(tmp_path / "turned").train_set.read(0)
    photograph(tmp_path / "stored", 6, "stored")
    with pytest.raises(UnreadableSampleError, match="turned by EXIF's orientation 6"):
        source(tmp_path / "stored", "--coco.exif=turn").train_set.read(0)


def test_annotations_with_one_id_are_each_what_they_are(tmp_path):
    """pycocotools would give the last one twice."""
    other = {"id": 0, "image_id": 100, "category_id": 3, "bbox": [0, 0, 10, 10]}
    written(tmp_path, "train2017", [(60, 80)] * 2, [other])
    images = source(tmp_path, "--coco.augment=none").train_set
    _, (boxes_M4, labels_M) = images.read(images.names.index("000.png"))
    assert labels_M.tolist() == [LABELS[3], LABELS[7]]
    assert not torch.equal(boxes_M4[0], boxes_M4[1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda c: (
                [one.pop("id") for one in c["annotations"]]
                and c["annotations"][2].update(category_id=5)
            ),
            "annotation number 3 of the file, which has no id, is of category 5, and its "
            "categories are 3, 7",
        ),
        (lambda c: c["annotations"][4].pop("category_id"), "annotation 4 has no 'category_id'"),
        (lambda c: c["annotations"][4].pop("image_id"), "annotation 4 has no 'image_id'"),
        (lambda c: c["annotations"][4].pop("bbox"), "annotation 4 has no 'bbox'"),
        (lambda c: c["annotations"][4].update(bbox=[1, 2, 3]), r"annotation 4 has the bbox \[1"),
        (lambda c: c["annotations"][4].update(bbox=[1, 2, -3, 9]), "not .left, top, width, height"),
        (lambda c: c["annotations"][0].update(bbox=[90, 9, 9, 9]), "outside of its 80 x 60 pixels"),
        (lambda c: c["annotations"].append(7), "number 17 of 'annotations' is a int"),
        (lambda c: c["images"][3].pop("id"), "image number 4 of the file has no 'id'"),
        (lambda c: c["images"][3].pop("width"), "image 97 has no 'width'"),
        (lambda c: c["images"][3].update(id=100), "two of its images have the id 100"),
        (lambda c: c["categories"][1].update(id=7), "two of its categories have the id 7"),
        (lambda c: c["categories"][1].pop("name"), "category 3 has no 'name'"),
        (lambda c: c.pop("categories"), "not a file of COCO's form: no 'categories'"),
        (lambda c: c["annotations"][0].update(category_id=5), "annotation 0 is of category 5"),
        (lambda c: c["annotations"][0].update(image_id=5), "annotation 0 is of image 5"),
        (lambda c: c.update(annotations=[]), "has no image with a box"),
        (lambda c: c["images"][0].update(file_name="../../secret"), "is not inside the folder"),
        (lambda c: c.update(images=3), "not a file of COCO's form"),
        (lambda c: c["images"][0].update(width=0), "image 100 has 0 x "),
    ],
)
def test_files_of_another_form_are_refused_in_a_line(coco, change, said):
    path = coco / "annotations" / "instances_train2017.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(RequestError, match=said) as error:
        source(coco)
    assert "\n" not in str(error.value)
    path.write_text("{")
    with pytest.raises(RequestError, match="not a file of COCO's form"):
        source(coco)
    path.unlink()
    with pytest.raises(RequestError, match=r"cannot read .*instances_train2017\.json: No such"):
        source(coco)


def test_a_detector_trains_on_it_and_is_evaluated(coco, tmp_path):
    finished = run(
        *TINY, DETECTOR, f"--image_size={SIZE}", f"--data=coco:{coco}",
        "--batch_size=2", "--max_steps=8", "--eval_interval=1", "--lr=1e-4",
        f"--output_dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    end = end_of(tmp_path / "run")
    assert end.status == "ok"
    (evaluated,) = of_kind(tmp_path / "run", records.EvalRecord)
    assert np.isfinite(evaluated.loss)


def test_what_a_model_wants_besides_is_told(coco, tmp_path):
    for model, size, said in (
        ("maskrcnn_resnet50_fpn", SIZE, "learns masks, which the data lacks"),
        ("ssdlite320_mobilenet_v3_large", 320, "--coco.shape square"),
    ):
        finished = run(
            *TINY, f"--model=torchvision:{model}", "--batch_size=2",
            f"--image_size={size}", f"--data=coco:{coco}", "--max_steps=2",
            f"--output_dir={tmp_path / model}",
        )  # fmt: skip
        assert finished.returncode != 0
        assert said in finished.stderr
