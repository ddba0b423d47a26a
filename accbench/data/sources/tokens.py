"""`--data tokens:FILE_OR_DIR`: text as blocks of tokens, from token arrays or UTF-8 files.

The tokens of text are its bytes, which needs no download: 256 tokens, and one for the end of a
document.
"""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset

from accbench import data
from accbench.config import TaskConfig
from accbench.config.field import flag
from accbench.distributed.process_group import Topology
from accbench.errors import RequestError

SUFFIXES = (".txt", ".md", ".rst")
"""Suffixes of the files in a folder that are read as text."""
END_OF_DOCUMENT = 256
"""Token after each file; the bytes are the tokens below it."""
# A larger vocabulary means a damaged file.
_MAX_TOKENS = 1 << 24
# Tokens read at once.
_CHUNK = 1 << 22


class Source(data.Source):
    """Consecutive blocks of `--seq_len` tokens; the last ones are held out for evaluation."""

    gives: ClassVar = "tokens"
    ignores_labels: ClassVar = False

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options of the data source tokens."""

        vocab_size: int | None = flag(
            None,
            "Size of the vocabulary. Unset: 257 for text; for arrays the highest token plus one, "
            "for which all tokens are read once.",
            minimum=1,
            maximum=_MAX_TOKENS,
        )
        eval_fraction: float = flag(
            0.1,
            "Fraction of the blocks, the last ones, that is held out for evaluation. 0: none.",
            minimum=0,
            maximum=1,
        )

    @classmethod
    def check(cls, location: str | None) -> None:
        if location is None:
            raise RequestError("--data tokens needs a file or folder: --data tokens:FILE_OR_DIR")
        open_tokens(Path(location))

    def __init__(
        self, location: str, task: TaskConfig, options: Options | None, topology: Topology
    ) -> None:
        self.task, self.topology = task, topology
        options = options or self.Options()
        path = Path(location)
        tokens = open_tokens(path)
        self.num_classes = options.vocab_size or count_tokens(path, tokens)
        if is_text(path) and self.num_classes <= END_OF_DOCUMENT:
            raise RequestError(
                f"--tokens.vocab_size {self.num_classes} is too small for text, which has "
                f"{END_OF_DOCUMENT + 1} tokens: its bytes and the end of a document"
            )
        num_blocks = (len(tokens) - 1) // task.seq_len
        if num_blocks < 1:
            raise RequestError(
                f"--data: {location} has {len(tokens):,} tokens, too few for a block of --seq_len "
                f"{task.seq_len} and the token behind it"
            )
        num_held_out = min(round(options.eval_fraction * num_blocks), num_blocks - 1)
        num_train = num_blocks - num_held_out
        self.train_set = Blocks(path, tokens, task.seq_len, range(num_train))
        self.eval_set = Blocks(path, tokens, task.seq_len, range(num_train, num_blocks))

    def train_loader(self) -> data.Loader:
        return data.Loader(
            self.train_set, self.task, self.topology, train=True, collate=TokenCollate
        )

    def eval_loader(self) -> data.Loader | None:
        if not len(self.eval_set):
            return None
        return data.Loader(
            self.eval_set, self.task, self.topology, train=False, collate=TokenCollate
        )


class Blocks(Dataset[torch.Tensor]):
    """Blocks of T + 1 tokens, int64; each begins with the last token of the block before.

    Every token except the very first is thus predicted once, as in nanoGPT's training.

    Args:
        path: the file or folder of the tokens.
        tokens: the tokens.
        seq_len: T.
        numbers: numbers of the blocks, counted from the beginning of `tokens`.
    """

    def __init__(self, path: Path, tokens: np.ndarray, seq_len: int, numbers: range) -> None:
        self.path, self.seq_len, self.numbers = path, seq_len, numbers
        self._tokens: np.ndarray | None = tokens

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._tokens is None:
            self._tokens = open_tokens(self.path)
        begin = self.numbers[index] * self.seq_len
        return torch.from_numpy(self._tokens[begin : begin + self.seq_len + 1].astype(np.int64))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the tokens: a mapped file would be sent to a loading process as a copy."""
        return {**self.__dict__, "_tokens": None}


@dataclasses.dataclass(frozen=True)
class TokenCollate:
    """Builds ({"input_ids": (N, T), "labels": (N, T)} int64, no problems) from (T + 1,) blocks.

    With `pad_to`, a short batch is padded with rows whose labels do not count.
    """

    pad_to: int = 0

    def __call__(self, samples: list[torch.Tensor]) -> tuple[data.Batch, list[str]]:
        blocks_NU = torch.stack(samples)
        missing = max(0, self.pad_to - len(samples))
        padding = (0, 0, 0, missing)  # rows below
        input_ids_NT = torch.nn.functional.pad(blocks_NU[:, :-1], padding)
        labels_NT = torch.nn.functional.pad(blocks_NU[:, 1:], padding, value=data.PADDING_LABEL)
        return {"input_ids": input_ids_NT.contiguous(), "labels": labels_NT.contiguous()}, []


def is_text(path: Path) -> bool:
    """Return whether a path is read as text, and not as an array of tokens."""
    return path.suffix not in (".npy", ".bin")


def open_tokens(path: Path) -> np.ndarray:
    """Open the tokens of a file or folder, (n,) integers; arrays are mapped, not read.

    Raises:
        RequestError: there are no tokens, or the files hold something else.
    """
    if not path.exists():
        raise RequestError(f"--data: there is no file or folder {path}")
    try:
        tokens = _text(path) if is_text(path) else _array(path)
    except OSError as error:
        raise RequestError(f"--data: cannot read {path}: {error.strerror or error}") from None
    if not len(tokens):
        raise RequestError(f"--data: {path} is empty")
    return tokens


def _array(path: Path) -> np.ndarray:
    if path.is_dir():
        raise RequestError(f"--data: {path} is a folder, and no array of tokens")
    if path.stat().st_size == 0:
        return np.empty(0, np.uint16)
    if path.suffix == ".bin":  # as nanoGPT writes it
        if path.stat().st_size % 2:
            raise RequestError(
                f"--data: {path} is no array of uint16: it has an odd number of bytes"
            )
        return np.memmap(path, np.dtype("<u2"), mode="r")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        why = " ".join(str(error).split())
        raise RequestError(f"--data: {path} is no .npy file of numbers: {why}") from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or array.ndim != 1:
        what = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else "zip"
        raise RequestError(
            f"--data: {path} holds {what}; tokens are integers in an array of one dimension"
        )
    return array


def _text(path: Path) -> np.ndarray:
    """Read files as bytes, uint16, in the order of their names, each with `END_OF_DOCUMENT`."""
    files = [path]
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file())
        if not files:
            raise RequestError(f"--data: {path} holds no text, no file *{', *'.join(SUFFIXES)}")
    end = np.array([END_OF_DOCUMENT], np.uint16)
    parts: list[np.ndarray] = []
    for file in files:
        content = file.read_bytes()
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(
                f"--data: {file} is no UTF-8 text (byte {error.start}); tokens come as .npy or .bin"
            ) from None
        if content:
            parts += [np.frombuffer(content, np.uint8).astype(np.uint16), end]
    return np.concatenate(parts) if parts else np.empty(0, np.uint16)


def count_tokens(path: Path, tokens: np.ndarray) -> int:
    """Return the size of the vocabulary: that of bytes for text, or the highest token plus one.

    Raises:
        RequestError: a token is negative, or too high to be one.
    """
    if is_text(path):
        return END_OF_DOCUMENT + 1
    parts = [tokens[begin : begin + _CHUNK] for begin in range(0, len(tokens), _CHUNK)]
    low, high = min(int(part.min()) for part in parts), max(int(part.max()) for part in parts)
    if low < 0:
        raise RequestError(f"--data: {path} has a token {low}; tokens count from 0")
    if high >= _MAX_TOKENS:
        raise RequestError(f"--data: {path} has a token {high}, and {_MAX_TOKENS:,} is the most")
    return high + 1
