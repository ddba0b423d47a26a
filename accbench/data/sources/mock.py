"""`--data mock`: the mock ImageNet that `prepare.sh` makes; `mock:DIR` for another folder."""

from pathlib import Path
from typing import Any

from accbench.config import TaskConfig
from accbench.data import mock_images
from accbench.data.sources import imagefolder
from accbench.distributed.process_group import Topology
from accbench.errors import RequestError


class Source(imagefolder.Source):
    """The mock ImageNet: real JPEG files with drawn pictures."""

    @classmethod
    def check(cls, location: str | None) -> None:
        folder = Path(location or mock_images.DEFAULT_FOLDER)
        if not mock_images.is_complete(folder):
            where = f" {location}" if location else ""
            raise RequestError(
                f"no mock images in {folder}; make them with: python -m accbench data mock{where}"
            )

    def __init__(
        self, location: str | None, task: TaskConfig, options: Any, topology: Topology
    ) -> None:
        super().__init__(location or mock_images.DEFAULT_FOLDER, task, options, topology)
