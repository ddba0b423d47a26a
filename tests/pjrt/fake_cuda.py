"""A stand-in for the NVIDIA driver's library, compiled on the spot."""

import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = """
#include <stddef.h>
#include <string.h>
int cuInit(unsigned flags) { return STATUS; }
int cuGetErrorName(int status, const char **name) { *name = "CUDA_ERROR_NO_DEVICE"; return 0; }
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuDeviceGetCount(int *count) { *count = GPUS; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
  strncpy(name, "NVIDIA Test 9000", size); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 1000 * (device + 1); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? 9 : 0; return 0; }
"""


def make_driver(folder: Path, num_gpus: int, status: int = 0) -> Path:
    """A folder for LD_LIBRARY_PATH whose libcuda.so.1 shows `num_gpus`, or fails with `status`."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    source = folder / "cuda.c"
    source.write_text(_SOURCE)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", f"-DGPUS={num_gpus}", f"-DSTATUS={status}",
         "-o", str(folder / "libcuda.so.1"), str(source)],
        check=True,
    )  # fmt: skip
    return folder
