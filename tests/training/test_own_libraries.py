"""Models of transformers and timm train by their own classes in loops of one's own, as plainly."""

import importlib.util
import json

import pytest

from tests.conftest import python
from tests.training import library_models
from tests.training.test_own_loop import ENGINES

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("transformers", "timm")),
    reason="no transformers or no timm",
)
ALL = [make.__name__ for make in (*library_models.TRANSFORMERS, *library_models.TIMM)]
DDP, INDUCTOR, JAX, XLA = ENGINES


def found_of(engine, folder, *names):
    done = python("-m", "tests.training.own_libraries", engine, folder, *names)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "found.json").read_text())


def check(found, names, is_exact):
    """Losses and updates are the plain loop's; outputs of all kinds are float32, batches moved."""
    assert [*found["trained"]] == names
    for name, one in found["trained"].items():
        assert one["losses"] == pytest.approx(one["plain"], rel=0 if is_exact else 1e-5), name
        assert one["far"] <= (0 if is_exact else 1e-4), name
    assert found["types"] == ["CausalLMOutputWithCrossAttentions", "torch.float32"]
    assert found["nests"] == {
        "kinds": ["Output"] * 3, "on_device": [True], "dtypes": ["torch.float32"],
        "samples": 4 + 4 + 2,
    }  # fmt: skip


@pytest.mark.parametrize("engine", [DDP, XLA])
def test_five_families_and_ten_of_timm_train_as_plainly(engine, tmp_path):
    check(found_of(engine, tmp_path), ALL, is_exact=engine == "ddp")


@pytest.mark.soak
@pytest.mark.parametrize("engine", [INDUCTOR, JAX])
def test_they_do_where_compiling_takes_minutes(engine, tmp_path):
    check(found_of(engine, tmp_path), ALL, is_exact=False)


@pytest.mark.parametrize("engine", [INDUCTOR, JAX])
def test_gpt2_in_bfloat16_and_nests_do_where_compiling_takes_minutes(engine, tmp_path):
    """Outputs of the libraries' own classes, and batches of own kinds."""
    check(found_of(engine, tmp_path, "none"), [], is_exact=False)
