"""Models of torchvision and timm by their names."""

import importlib.util

import pytest
import torch
import torch._dynamo  # which cannot be imported where meta is the default device
import torchvision
from torch.nn import functional
from torchvision.models.inception import InceptionOutputs

from accbench import cli, models
from accbench.errors import RequestError
from accbench.models.tasks import registered, segmentation
from accbench.training import label_counts
from tests.conftest import TINY, end_of, run

TORCHVISION = torchvision.models.list_models(module=torchvision.models)
DETECTION = torchvision.models.list_models(module=torchvision.models.detection)
SEGMENTATION = torchvision.models.list_models(module=torchvision.models.segmentation)
# Those that do not take 64 pixels.
SIZES = {
    "inception_v3": 299, "maxvit_t": 224, "vit_h_14": 70,
    "ssd300_vgg16": 300, "ssdlite320_mobilenet_v3_large": 320,
}  # fmt: skip


def spec_of(name: str):
    return models.resolve(f"torchvision:{name}", SIZES.get(name, 64))


def batch_of(spec, batch_size: int = 2, num_classes: int = 10):
    return spec.synthetic_batch(batch_size, num_classes, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", [name for name in TORCHVISION if not name.startswith("regnet")])
def test_every_classifier_of_torchvision_builds(name):
    with torch.device("meta"):
        model = spec_of(name).build(10)
    last = [p for p in model.parameters() if p.dim() > 1][-1]
    assert last.is_meta
    assert last.shape[0] == 10


def test_regnets_build():
    """Which ask for values while they are built, that there are none of on the meta device."""
    spec = spec_of("regnet_x_400mf")
    assert spec.build(10).eval()(batch_of(spec)[0]).shape == (2, 10)
    assert all(spec_of(name).name.endswith(name) for name in TORCHVISION if "regnet" in name)


def test_names_are_those_that_the_libraries_have():
    timm = pytest.importorskip("timm")
    assert list(registered.names("torchvision", "models")) == TORCHVISION
    assert list(registered.names("torchvision", "models/detection")) == DETECTION
    assert list(registered.names("torchvision", "models/segmentation")) == SEGMENTATION
    assert set(registered.names("timm", "models")) == set(timm.list_models())


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("torchvision:resnet51", "resnet50"),
        ("torchvision:fasterrcnn_resnet50", "fasterrcnn_resnet50_fpn"),
        ("timm:vit_tiny_patch16", "vit_tiny_patch16_224"),
    ],
)
def test_a_wrong_name_gives_the_closest(capsys, name, close):
    assert cli.run([f"--model={name}", "--data=synthetic"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert name.partition(":")[2] in line
    assert close in line.partition("closest are")[2]


@pytest.mark.parametrize(
    ("name", "size", "wanted"),
    [
        ("torchvision:inception_v3", 96, "299"),
        ("torchvision:alexnet", 32, "63"),
        ("torchvision:vit_b_16", 100, "16"),
        ("torchvision:maxvit_t", 64, "224"),
        ("torchvision:ssd300_vgg16", 64, "--image_size 300"),
        ("timm:crossvit_tiny_240", 64, "made for 240"),
    ],
)
def test_a_size_that_does_not_fit_is_named(name, size, wanted):
    if name.startswith("timm"):
        pytest.importorskip("timm")
    with pytest.raises(RequestError) as refused:
        models.resolve(name, size).build(10)
    assert str(size) in str(refused.value)
    assert wanted in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_timm_the_command_that_installs_it_is_told(monkeypatch):
    # Stands in for an environment without the package.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"needs timm, which is not installed: .*\[models\]"):
        models.resolve("timm:resnet18", 64)


def test_a_model_of_timm_gets_its_size_and_its_classes():
    pytest.importorskip("timm")
    spec = models.resolve("timm:test_vit", 32)
    model = spec.build(7)
    assert model(batch_of(spec, num_classes=7)[0]).shape == (2, 7)


def test_classifiers_on_the_way_count_in_the_loss():
    spec = spec_of("googlenet")
    model = spec.build(10)
    images, labels = batch_of(spec)
    torch.manual_seed(1)  # of dropout
    loss = spec.loss(model, (images, labels))
    torch.manual_seed(1)
    last, second, first = model(images)
    expected = functional.cross_entropy(last, labels)
    for logits in (first, second):
        expected = expected + 0.3 * functional.cross_entropy(logits, labels)
    torch.testing.assert_close(loss, expected)


def test_inceptions_classifier_on_the_way_counts_in_the_loss():
    """Of outputs as it gives them; the network itself takes long at the size that it wants."""
    last, aux = torch.randn(2, 2, 10)
    labels = torch.tensor([3, 7])
    loss = spec_of("inception_v3").loss(lambda _: InceptionOutputs(last, aux), (None, labels))
    expected = functional.cross_entropy(last, labels) + 0.4 * functional.cross_entropy(aux, labels)
    torch.testing.assert_close(loss, expected)


def test_pixels_that_are_ignored_count_for_nothing():
    spec = spec_of("deeplabv3_mobilenet_v3_large")
    model = spec.build(10)
    images, masks = batch_of(spec)
    assert images.shape == (2, 3, 64, 64)
    assert masks.shape == (2, 64, 64)
    masks[:, 20:] = segmentation.IGNORED
    model.eval()  # of dropout; the classifier on the way stays
    output = model(images)

    def by_hand(logits: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits[:, :, 1:20], masks[:, 1:20])

    expected = by_hand(output["out"]) + 0.5 * by_hand(output["aux"])
    torch.testing.assert_close(spec.loss(model, (images, masks)), expected)
    uneven = masks.clone()
    uneven[1, 10:20] = segmentation.IGNORED
    whole = spec.loss(model, (images, uneven))
    none = torch.full_like(masks[:1], segmentation.IGNORED)
    rows = [(images[:1], uneven[:1]), (images[1:], uneven[1:]), (images[:1], none)]
    losses = [spec.loss(model, part) for part in label_counts.of_parts(spec, rows)]
    torch.testing.assert_close(sum(losses) / 3, whole)
    loss, right, top5, num_pixels = spec.score(model, (images, masks)).tolist()
    assert num_pixels == 2 * 19 * 64
    assert loss / num_pixels == pytest.approx(by_hand(output["out"]).item(), rel=1e-4)
    assert right == (output["out"].argmax(1) == masks)[:, 1:20].sum()
    assert top5 != top5
    assert spec.problem((images, masks), 10) is None
    assert "0 to 4" in spec.problem((images, masks), 5)


def test_padded_objects_count_for_nothing():
    spec = spec_of("retinanet_resnet50_fpn")
    model = spec.build(10)
    model.eval()  # losses it has all the same
    images, targets = batch_of(spec)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    loss = spec.loss(model, (images, targets))
    more = {name: torch.cat([t, torch.zeros_like(t[:, :1])], 1) for name, t in targets.items()}
    torch.testing.assert_close(spec.loss(model, (images, more)), loss)
    fewer = {**targets, "labels": targets["labels"] * torch.tensor([1, 1, 0, 0])}
    assert spec.loss(model, (images, fewer)) != loss
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("fcos_resnet50_fpn", {}),
        ("maskrcnn_resnet50_fpn", {"masks": (2, 4, 64, 64)}),
        ("keypointrcnn_resnet50_fpn", {"keypoints": (2, 4, 17, 3)}),
    ],
)
def test_batches_of_detectors(name, more):
    spec = spec_of(name)
    images, targets = batch_of(spec)
    assert images.shape == (2, 3, 64, 64)
    shapes = {name: tuple(tensor.shape) for name, tensor in targets.items()}
    assert shapes == {"boxes": (2, 4, 4), "labels": (2, 4), **more}
    assert spec.problem((images, targets), 10) is None
    assert "labels" in spec.problem((images, targets), 2)
    turned = {**targets, "boxes": targets["boxes"].flip(2)}
    assert "boxes" in spec.problem((images, turned), 10)


def test_a_detector_trains(tmp_path):
    flags = [flag for flag in TINY if not flag.startswith(("--model", "--image_size"))]
    result = run(
        *flags, "--model=torchvision:fasterrcnn_mobilenet_v3_large_320_fpn", "--image_size=64",
        "--data=synthetic", "--synthetic.num_classes=5", "--batch_size=2", "--save_interval=0",
        "--max_steps=4", f"--output_dir={tmp_path}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert end_of(tmp_path).num_steps == 4
