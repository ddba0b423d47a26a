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
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["accbench", "accbench.*"]),
    package_data={"accbench.report": ["*.json", "*.css"]},
    install_requires=[
        "torch>=2.8",
        "torchvision>=0.23",
        "numpy>=1.26",
        "pillow>=10",
        "pyyaml>=6",
        "rich>=13",
        "tyro>=1.0,<2",  # 1.0 settled its markers and messages
        "scipy>=1.10",
    ],
    extras_require={
        # The last torch_xla that knows the device type CUDA, and what it was built for.
        "xla": ["torch==2.8.0", "torchvision==0.23.0", "torch_xla==2.8.1"],
        "nvidia": ["nvidia-ml-py>=12"],  # clocks, throttling and power in `accbench compare`
        "notebook": [
            "matplotlib>=3.8",
            "ipykernel>=6",
        ],
        "dev": [
            "ipykernel==7.4.0",
            "jsonschema==4.26.0",
            "matplotlib==3.11.2",
            "nbclient==0.11.0",
            "nbformat==5.11.1",
            "mypy==2.4.1",
            "pytest==9.2.0",
            "pytest-timeout==2.4.0",
            "pytest-xdist==3.8.0",
            "psutil==7.2.2",
            "ruff==0.17.5",
            "types-PyYAML",
            "types-jsonschema",
        ],
    },
    entry_points={"console_scripts": ["accbench=accbench.cli:main"]},
)
