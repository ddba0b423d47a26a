"""accbench's packages; tools are set up in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "accbench/__init__.py").read_text())
assert VERSION

setup(
    name="accbench",
    version=VERSION[1],
    description="Train PyTorch models plainly or compiled by XLA, and measure both alike.",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    python_requires=">=3.10,<3.15",
    packages=find_packages(include=["accbench", "accbench.*"]),
    package_data={
        "accbench": ["py.typed"],
        "accbench.report": ["*.json", "*.css"],
        "accbench.preflight": ["gpus/*.yaml"],
    },
    install_requires=[
        "torch>=2.8",
        "torchvision>=0.23",
        "numpy>=1.26",
        "pillow>=10",
        "pyyaml>=6",
        "packaging>=23",
        "psutil>=5.9",
        "rich>=13",
        "safetensors>=0.5",
        "simplejpeg>=1.8",
        "tyro>=1.0,<2",  # 1.0 settled its markers and messages
        "scipy>=1.10",
    ],
    extras_require={
        # The last torch_xla that knows the device type CUDA, and what it was built for; there are
        # wheels for Python 3.10 to 3.13, which prepare.sh and accbench/extras.py know too.
        "xla": ["torch==2.8.0", "torchvision==0.23.0", "torch_xla==2.8.1"],
        # The same on NVIDIA GPUs. The plugin is the release of the same summer as torch_xla's
        # XLA; nvcc brings ptxas and libdevice of the CUDA that torch 2.8 is built with. cuDNN
        # (9.10.2, the plugin wants 9.8 or newer) and NCCL (2.27.3) are those that torch pins.
        "xla-cuda12": [
            "torch==2.8.0",
            "torchvision==0.23.0",
            "torch_xla==2.8.1",
            "jax-cuda12-pjrt==0.6.2",
            "nvidia-cuda-nvcc-cu12==12.8.93",
        ],
        "digits": ["scikit-learn>=1.4"],  # which has the scans in its package
        "tensorboard": ["tensorboard>=2.16"],
        "onnx": ["onnx>=1.17", "onnxscript>=0.5", "onnxruntime>=1.20"],
        "s3": ["s3fs>=2024.6"],
        "dask": ["distributed>=2025.1", "cryptography>=42"],  # the latter makes TLS certificates
        # XLA through JAX, beside any torch; 0.10 is the last for Python 3.11.
        "jax": ["jax>=0.10,<0.13"],
        # JAX's own plug-ins and CUDA libraries. torch 2.13 and later bring CUDA 13, so jax-cuda13
        # shares them; jax-cuda12 beside such a torch installs both.
        "jax-cuda12": ["jax[cuda12]>=0.10,<0.13"],
        "jax-cuda13": ["jax[cuda13]>=0.10,<0.13"],
        "jax-tpu": ["jax[tpu]>=0.10,<0.13"],
        "nvidia": ["nvidia-ml-py>=12"],  # clocks, throttling and power in `accbench compare`
        "notebook": [
            "matplotlib>=3.8",
            "ipykernel>=6",
        ],
        # Pinned is what judges the code; the rest only has to work on every Python named above.
        # Models of other libraries: --model timm:NAME, and the language models.
        "models": ["timm>=1.0.9", "transformers>=4.56"],
        "dev": [
            "build>=1.2",
            "cryptography>=42",
            "distributed>=2025.1",
            "jax>=0.10,<0.13; python_version >= '3.11'",
            "timm>=1.0.9",
            "transformers>=4.56",
            # XLA's compiler for GPUs, to compile for some that are not there; 0.4 GB.
            "jax-cuda12-pjrt==0.6.2; sys_platform == 'linux' and platform_machine == 'x86_64'",
            "nvidia-cuda-nvcc-cu12==12.8.93; "
            "sys_platform == 'linux' and platform_machine == 'x86_64'",
            "hypothesis>=6.100",
            "s3fs>=2024.6",
            "scikit-learn>=1.4",
            "tensorboard>=2.16",
            "onnx>=1.17",
            "onnxscript>=0.5",
            "onnxruntime>=1.20",
            "moto[server,s3]>=5.1",
            "ipykernel>=6",
            "jsonschema>=4.20",
            "kubeflow-trainer-api>=2.2",  # to check docs/trainjob.yaml
            "matplotlib>=3.8",
            "nbclient>=0.10",
            "nbformat>=5.10",
            "mypy==2.4.1",
            "pytest==9.2.0",
            "pytest-timeout==2.4.0",
            "pytest-xdist==3.8.0",
            "psutil==7.2.2",
            "ruff==0.17.5",
            "setuptools>=70.1",  # makes wheels without the package `wheel`
            "twine==7.0.0",
            "types-PyYAML",
            "webdataset>=0.2.100",
            "types-jsonschema",
        ],
    },
    entry_points={
        "console_scripts": ["accbench=accbench.cli:main"],
        "torch_xla.plugins": ["CUDA=accbench.pjrt.cuda:plugin"],
    },
)
