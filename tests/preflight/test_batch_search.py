"""The search for the largest batch that fits."""

import pytest

from accbench.errors import RequestError
from accbench.preflight import batch_search


@pytest.mark.parametrize(
    ("base", "slope", "memory", "first", "largest"),
    [
        (100, 10, 1000, 8, 88),  # 100 + 88 * 10 = 980
        (100, 10, 1000, 512, 88),  # from one that does not fit
        (100, 10, 1000, 12, 88),  # from one that is no multiple
        (0, 1, 4096, 8, 4096),
        (100, 10, 50, 8, None),
    ],
)
def test_the_largest_batch_is_found_with_few_compilations(base, slope, memory, first, largest):
    tried = []

    def peak_bytes(batch):
        tried.append(batch)
        return base + slope * batch

    known = {first: base + slope * first}
    found = batch_search.search(peak_bytes, known, memory, multiple_of=8)
    assert found["largest"] == largest
    assert len(tried) <= 6
    assert all(batch % 8 == 0 for batch in tried)


def test_a_batch_that_cannot_be_compiled_counts_as_too_large():
    def peak_bytes(batch):
        if batch > 100:
            raise RequestError("the compiler ended")
        return batch

    found = batch_search.search(peak_bytes, {8: 8}, 1000, multiple_of=8)
    assert found["largest"] == 96
    assert "the compiler ended" in found["limit"]
    assert [batch for batch, need, fits in found["tried"] if need is None and not fits]
