"""The order of rows within rounds: drawn, repeatable and balanced."""

from collections import Counter

import pytest

from accbench.comparing.order import round_orders


@pytest.mark.parametrize("rows", ["AB", "ABC", "ABCD", "ABCDE"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_row_is_as_often_at_each_position_and_after_each_other(rows, seed):
    orders = ["".join(order) for order in round_orders(rows, 2 * len(rows), seed)]
    assert all(sorted(order) == sorted(rows) for order in orders)
    for half in (orders[: len(rows)], orders[len(rows) :]):
        for rows_there in zip(*half, strict=True):
            assert sorted(rows_there) == sorted(rows)
    follows = Counter(pair for order in orders for pair in zip(order, order[1:], strict=False))
    assert set(follows.values()) == {2}
    assert len(follows) == len(rows) * (len(rows) - 1)


def test_a_seed_repeats_its_order_and_others_differ():
    def orders(seed):
        return tuple(map(tuple, round_orders("ABC", 5, seed)))

    assert orders(4) == orders(4)
    assert len({orders(seed) for seed in range(20)}) > 10
    assert len({orders(seed)[0] for seed in range(50)}) == 6
    assert set(orders(None)) == {("A", "B", "C")}  # comparisons of before
