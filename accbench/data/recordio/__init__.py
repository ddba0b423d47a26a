"""MXNet's RecordIO files: data sets, and reading and writing records."""

from accbench.data.recordio.dataset import RecordIODataset, Samples
from accbench.data.recordio.faces import MXFaceDataset
from accbench.data.recordio.file import ImageRecord, RecordFile, image_record, write_record

__all__ = [
    "ImageRecord", "MXFaceDataset", "RecordFile", "RecordIODataset", "Samples",
    "image_record", "write_record",
]  # fmt: skip
