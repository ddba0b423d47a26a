"""MXNet's RecordIO files: the data source, its data sets, and reading and writing records."""

from accbench.data.recordio.faces import MXFaceDataset
from accbench.data.recordio.file import ImageRecord, RecordFile, image_record, write_record
from accbench.data.recordio.source import RecordIODataset, Samples, Source

__all__ = [
    "ImageRecord", "MXFaceDataset", "RecordFile", "RecordIODataset", "Samples", "Source",
    "image_record", "write_record",
]  # fmt: skip
