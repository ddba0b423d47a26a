"""GPUs as files."""

import pytest

from accbench.errors import RequestError
from accbench.pjrt import gpu

GOOD = gpu._FOLDER.joinpath("h100.yaml").read_text()


@pytest.mark.parametrize("name", gpu.names())
def test_every_gpu_has_plausible_figures(name):
    found = gpu.load(name)
    assert 7.0 <= float(found.compute_capability) <= 12.0
    assert 10e9 < found.memory_bytes < 300e9
    assert 300 <= found.memory_gb_per_s <= 9000
    assert found.flops_per_s("f16") == max(found.dense_tflops.values()) * 1e12
    assert found.flops_per_s("f32") < found.flops_per_s("f16")
    # float32 without tensor cores: two operations a lane and clock
    lanes = found.multiprocessors * found.float32_lanes_per_multiprocessor
    peak = 2 * lanes * found.clock_ghz * 1e9
    assert 0.85 < found.dense_tflops["float32"] * 1e12 / peak < 1.1
    assert "gpu_device_info {" in found.target_config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("multiprocessors: 132", "multiprocessors: many"), "multiprocessors must be a whole"),
        (("multiprocessors: 132", "multiprocessors: 1.5"), "multiprocessors must be a whole"),
        (("clock_ghz: 1.98", "clock_ghz: .nan"), "clock_ghz must be a number above 0"),
        (("memory_bytes: 84942979072", "memory_bytes: 0"), "memory_bytes must be"),
        (("clock_ghz: 1.98\n", ""), "lacks clock_ghz"),
        (("clock_ghz: 1.98", "clock_ghz: 1.98\ncolour: red"), "has unknown colour"),
        (('"9.0"', "hopper"), "compute_capability must be"),
        (("  float32: 66.9", "  float16x: 66.9"), "float32 in it"),
        (("name: NVIDIA", "name: [NVIDIA"), "while parsing"),
        ((GOOD, "- a list"), "not a mapping"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(tmp_path, change, message):
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD.replace(*change))
    with pytest.raises(RequestError, match=message) as caught:
        gpu.load(str(path))
    assert "\n" not in str(caught.value)


def test_unknown_gpus_are_answered_with_the_known_ones(tmp_path):
    with pytest.raises(RequestError, match="h100, h100_pcie"):
        gpu.load("h101")
    with pytest.raises(RequestError, match="No such file"):
        gpu.load(str(tmp_path / "none.yaml"))
