"""The mock ImageNet: real files, the same for a seed, whole or taken up again."""

import numpy as np
import pytest
from PIL import Image

from accbench.data import mock_images
from accbench.errors import RequestError
from tests.conftest import HANG_S, run, wait_until
from tests.signals import Signalled

SMALL = mock_images.MockImagePlan(num_classes=2, num_train=3, num_val=1)


def contents(folder) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.jpg"))}


def test_same_seed_same_files(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        plan = mock_images.MockImagePlan(2, 3, 1, seed)
        mock_images.make(tmp_path / name, plan)
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b
    assert a.keys() == c.keys()
    assert all(a[name] != c[name] for name in a)
    assert len(a) == 2 * (3 + 1)


def test_spread_is_that_of_photographs():
    random = np.random.default_rng(0)
    pictures = [mock_images.picture(random, label=i % 10) for i in range(200)]
    sizes = [picture.size for picture in pictures]
    assert sizes.count((500, 375)) > 60
    assert sum(height > width for width, height in sizes) > 40
    assert 1 <= sum(picture.mode == "L" for picture in pictures) <= 20


def test_interrupted_making_is_taken_up(tmp_path):
    folder = tmp_path / "mock"
    arguments = ("-m", "accbench", "data", "mock", folder, "--classes=4", "--train_images=40")
    process = Signalled(arguments)
    wait_until(lambda: len(list(folder.rglob("*.jpg"))) > 5)
    process.kill()  # no chance to tidy up
    process.communicate(HANG_S)
    assert not mock_images.is_complete(folder)
    kept = next(iter(folder.rglob("*.jpg")))
    changed = kept.stat().st_mtime_ns

    result = run(*arguments, script="-B")
    assert result.returncode == 0, result.stderr
    assert kept.stat().st_mtime_ns == changed
    assert mock_images.is_complete(folder)
    files = list(folder.rglob("*.jpg"))
    assert len(files) == 4 * (40 + 16)
    for file in files:
        Image.open(file).load()


def test_another_plan_starts_clean(tmp_path):
    mock_images.make(tmp_path, SMALL)
    mock_images.make(tmp_path, mock_images.MockImagePlan(num_classes=1, num_train=2, num_val=1))
    assert len(list(tmp_path.rglob("*.jpg"))) == 3


def test_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RequestError, match="holds something else"):
        mock_images.make(tmp_path, SMALL)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
