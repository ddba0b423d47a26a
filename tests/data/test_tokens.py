"""Text and arrays of tokens to blocks."""

import pickle

import numpy as np
import pytest
import torch

from accbench import config, resolving
from accbench.config import plugins
from accbench.data import PADDING_LABEL
from accbench.distributed.process_group import Topology
from accbench.errors import RequestError
from accbench.recording import records
from tests.conftest import TINY, end_of, of_kind, run

LENGTH = 4


def source(path, *flags, topology=Topology()):  # noqa: B008
    task = resolving.resolve(
        config.parse(
            [*TINY, "--model=lstm_tiny", f"--data=tokens:{path}", f"--seq_len={LENGTH}",
             "--batch_size=2", *flags]
        )
    )  # fmt: skip
    return plugins.load("data", "tokens")(str(path), task, task.options["tokens"], topology)


@pytest.fixture
def counted(tmp_path):
    """Tokens 0 to 80: twenty blocks of four and the token behind the last."""
    path = tmp_path / "counted.npy"
    np.save(path, np.arange(81, dtype=np.int32))
    return path


def rows(loader) -> list[list[int]]:
    """The tokens of each block that is not padding, those to be told behind the others."""
    found = []
    for batch in loader:
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
        for tokens, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            if (labels != PADDING_LABEL).any():
                assert torch.equal(tokens[1:], labels[:-1])
                found.append([*tokens.tolist(), int(labels[-1])])
    return found


def test_every_token_is_told_once_an_epoch(counted):
    for loading in ("--workers=0", "--workers=1"):
        made = source(counted, loading)
        assert made.num_classes == 81
        train, held_out = rows(made.train_loader()), rows(made.eval_loader())
        blocks = [list(range(begin, begin + 5)) for begin in range(0, 80, 4)]
        assert sorted(train) == blocks[:18]
        assert train != blocks[:18]  # shuffled
        assert held_out == blocks[18:]


def test_ranks_share_blocks_and_short_evaluations_are_padded(counted):
    shards = [source(counted, topology=Topology(rank, rank, 3, 3)) for rank in range(3)]
    train = [row for shard in shards for row in rows(shard.train_loader())]
    assert len(train) == 18
    assert len({tuple(row) for row in train}) == 18
    batches = [batch for shard in shards for batch in shard.eval_loader()]
    assert [len(batch["labels"]) for batch in batches] == [2, 2]  # one block each, and padding
    assert sorted(row[0] for shard in shards for row in rows(shard.eval_loader())) == [72, 76]


def test_an_epoch_goes_on_inside(counted):
    whole = rows(source(counted).train_loader())
    loader = source(counted).train_loader()
    state = loader.state_dict(3)
    later = source(counted).train_loader()
    later.load_state_dict(state)
    assert rows(later) == whole[6:]


def test_mapped_files_do_not_travel_to_loading_processes(tmp_path):
    np.save(tmp_path / "large.npy", np.arange(9999))
    made = source(tmp_path / "large.npy").train_set
    assert len(pickle.dumps(made)) < 1000
    assert torch.equal(pickle.loads(pickle.dumps(made))[3], made[3])


def test_formats_of_arrays(tmp_path):
    tokens = np.array([5, 0, 65535, 7, 8, 1], np.uint16)
    tokens.astype("<u2").tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", tokens.astype(">u8"))
    for name in ("a.bin", "b.npy"):
        made = source(tmp_path / name, "--batch_size=1")
        assert rows(made.train_loader()) == [[5, 0, 65535, 7, 8]]
        assert made.num_classes == 65536
        assert made.eval_loader() is None
    assert source(tmp_path / "a.bin", "--tokens.vocab_size=70000").num_classes == 70000


def test_text_is_bytes_in_the_order_of_names(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.md").write_text("zé", encoding="utf-8")
    (tmp_path / "c.txt").write_text("!", encoding="utf-8")
    (tmp_path / "a.rst").write_text("ab", encoding="utf-8")
    (tmp_path / "a.jpg").write_bytes(b"\xff\xd8")  # no text by its name
    (tmp_path / "empty.txt").touch()
    made = source(tmp_path, "--batch_size=1", "--tokens.eval_fraction=0", "--seq_len=8")
    assert rows(made.train_loader()) == [[97, 98, 256, 122, 0xC3, 0xA9, 256, 33, 256]]
    assert made.num_classes == 257


def npy(array):
    return lambda path: np.save(path, array, allow_pickle=True)


@pytest.mark.parametrize(
    ("name", "write", "flags", "message"),
    [
        ("none.npy", lambda _: None, (), "there is no file or folder"),
        ("empty.txt", lambda path: path.touch(), (), "is empty"),
        ("empty.bin", lambda path: path.touch(), (), "is empty"),
        ("short.txt", lambda path: path.write_text("abc"), (), "has 4 tokens, too few"),
        ("odd.bin", lambda path: path.write_bytes(b"abc"), (), "odd number of bytes"),
        ("folder", lambda path: path.mkdir(), (), r"holds no text, no file \*.txt"),
        ("folder.npy", lambda path: path.mkdir(), (), "is a folder"),
        ("image.txt", lambda path: path.write_bytes(b"a\xff\xd8"), (), r"no UTF-8 text \(byte 1\)"),
        ("text.npy", lambda path: path.write_text("abc"), (), "no .npy file of numbers"),
        ("pickled.npy", npy(np.array([{}, 1])), (), "no .npy file of numbers"),
        ("real.npy", npy(np.zeros(9)), (), "holds float64 of shape"),
        ("matrix.npy", npy(np.zeros((9, 9), int)), (), "one dimension"),
        ("negative.npy", npy(np.arange(-1, 8)), (), "has a token -1"),
        ("large.npy", npy(np.arange(9) * 10**9), (), "has a token 8000000000"),
        ("some.txt", lambda path: path.write_text("some text"), ("--tokens.vocab_size=256",),
         "too small for text"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(tmp_path, name, write, flags, message):
    write(tmp_path / name)
    with pytest.raises(RequestError, match=message) as error:
        source(tmp_path / name, *flags)
    assert "\n" not in str(error.value)
    assert name in str(error.value) or flags


def test_a_run_counts_tokens_and_names_those_that_are_too_large(counted, tmp_path):
    run_dir = tmp_path / "run"
    flags = (*TINY, "--model=lstm_tiny", f"--data=tokens:{counted}", f"--seq_len={LENGTH}",
             "--batch_size=2", "--max_steps=9", f"--output_dir={run_dir}")  # fmt: skip
    result = run(*flags)
    assert result.returncode == 0, result.stderr
    (header,) = of_kind(run_dir, records.RunRecord)
    assert (header.unit, header.units_per_sample) == ("tokens", LENGTH)
    assert "tokens/s" in result.stdout
    assert "samples/s" not in result.stdout
    (scores,) = of_kind(run_dir, records.EvalRecord)
    assert scores.num_samples == 2 * LENGTH
    assert "evaluated 8 tokens" in result.stdout
    assert end_of(run_dir).num_samples == 18
    result = run(*flags, "--tokens.vocab_size=40", "--output_dir", tmp_path / "other")
    assert result.returncode == 2
    assert "where the model has 40, 0 to 39" in result.stderr
