"""Every kind of nest: moved, cast, counted and cut, each of its own type, the given untouched."""

import copy
import dataclasses
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Mapping, MutableMapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree

from accbench.data import moving, nested
from accbench.errors import RequestError

Pair = namedtuple("Pair", "first second")
META = torch.device("meta")


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    name: str = "of a test"
    later: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.beside = self.logits + 1  # no field


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    logits: torch.Tensor
    count: int = 0


class Labelled(torch.Tensor):
    """A tensor of a class of its own."""


class Owner(MutableMapping):
    """A mapping that keeps its items in an attribute, which a plain copy shares."""

    def __init__(self, items: Any) -> None:
        self.items_of_own = dict(items)

    def __getitem__(self, key: Any) -> Any:
        return self.items_of_own[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items_of_own[key] = value

    def __delitem__(self, key: Any) -> None:
        del self.items_of_own[key]

    def __iter__(self) -> Any:
        return iter(self.items_of_own)

    def __len__(self) -> int:
        return len(self.items_of_own)


class Fixed(Mapping):
    """A mapping that nobody writes to."""

    def __init__(self, items: Any) -> None:
        self._items = dict(items)

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Any:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Named(list):
    """A list with an attribute."""

    name = "none"


class Registered:
    """Known to torch's pytree alone."""

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self.tensor, self.name = tensor, name


_pytree.register_pytree_node(
    Registered, lambda r: ([r.tensor], r.name), lambda parts, name: Registered(parts[0], name)
)


class Graphs:
    """A batch as graph libraries have it: with a `to` of its own, in place or not."""

    def __init__(self, x: torch.Tensor, num_graphs: int) -> None:
        self.store, self.num_graphs = {"x": x}, num_graphs
        self.device = x.device

    def to(self, device: torch.device, non_blocking: bool = False) -> "Graphs":
        other = copy.copy(self)
        other.store = {
            k: v.to(device=device, non_blocking=non_blocking) for k, v in self.store.items()
        }
        other.device = device
        return other


class Unknown:
    """Nothing says how one of these is made with other tensors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.inner = {"tensor": [tensor]}


def half() -> torch.Tensor:
    return torch.ones(4, 2, dtype=torch.bfloat16)


def named_list() -> Named:
    named = Named([half()])
    named.name = "kept"
    return named


def model_output() -> Any:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    return outputs.SequenceClassifierOutput(loss=half(), logits=half())


def batch_encoding() -> Any:
    return pytest.importorskip("transformers").BatchEncoding({"input_ids": half()})


def cache() -> Any:
    made = pytest.importorskip("transformers.cache_utils").DynamicCache()
    made.update(half().view(1, 1, 4, 2), half().view(1, 1, 4, 2), 0)
    return made


MAKERS = {
    "tuple": lambda: (half(), "text", 3), "list": lambda: [half(), None],
    "list's subclass": named_list, "namedtuple": lambda: Pair(half(), {"a": half()}),
    "return type": lambda: half().max(0), "dict": lambda: {"a": half(), 3: [half()]},
    "OrderedDict": lambda: OrderedDict(a=half()),
    "defaultdict": lambda: defaultdict(list, a=[half()]),
    "dataclass": lambda: Output(half()), "frozen dataclass": lambda: Frozen(half()),
    "deque": lambda: deque([half(), 1], maxlen=2), "UserList": lambda: UserList([half()]),
    "UserDict": lambda: UserDict(a=half()), "MutableMapping": lambda: Owner({"a": half()}),
    "Mapping": lambda: Fixed({"a": half()}), "proxy": lambda: MappingProxyType({"a": half()}),
    "namespace": lambda: SimpleNamespace(a=half(), b=[half()]),
    "distribution": lambda: torch.distributions.Normal(half(), half()),
    "packed": lambda: pack_sequence([half(), half()[:2]]),
    "registered": lambda: Registered(half(), "r"),
    "ModelOutput": model_output, "BatchEncoding": batch_encoding, "cache": cache,
}  # fmt: skip


@pytest.mark.parametrize("kind", MAKERS)
def test_a_nest_is_cast_and_moved_whole_and_stays_what_it_is(kind):
    nest = MAKERS[kind]()
    before = [(t.dtype, t.device.type) for t in nested.tensors_of(nest)]
    assert before
    cast = nested.mapped(nest, lambda t: t.float() if t.is_floating_point() else t)
    moved = moving.moved(nest, META)
    for other in (cast, moved):
        assert type(other) is type(nest)
        assert len(nested.tensors_of(other)) == len(before)
    assert not any(t.dtype is torch.bfloat16 for t in nested.tensors_of(cast))
    assert {t.device.type for t in nested.tensors_of(moved)} == {"meta"}
    assert [(t.dtype, t.device.type) for t in nested.tensors_of(nest)] == before


def test_what_is_beside_the_tensors_stays():
    to_float = torch.Tensor.float
    output = nested.mapped(Output(half()), to_float)
    assert (output.name, output.later, output.beside.dtype) == ("of a test", None, torch.float32)
    assert nested.mapped(named_list(), to_float).name == "kept"
    assert nested.mapped(MAKERS["deque"](), to_float).maxlen == 2
    assert nested.mapped(MAKERS["defaultdict"](), to_float).default_factory is list
    assert nested.mapped(MAKERS["registered"](), to_float).name == "r"
    cast = nested.mapped(MAKERS["namedtuple"](), to_float)
    assert cast.second["a"] is cast[1]["a"]


def test_outputs_of_transformers_agree_with_their_items():
    output = nested.mapped(model_output(), torch.Tensor.float)
    assert output.logits is output["logits"] is output[1]
    assert output.logits.dtype is torch.float32


@pytest.mark.parametrize("in_place", [False, True])
def test_an_object_moves_itself_by_its_own_to(in_place):
    class InPlace(Graphs):
        def to(self, device: torch.device) -> None:  # type: ignore[override]
            self.store["x"], self.device = self.store["x"].to(device), device

    graphs = (InPlace if in_place else Graphs)(half(), 2)
    moved = moving.moved({"graphs": [graphs], "y": torch.ones(2)}, META)
    (other,) = moved["graphs"]
    assert type(other) is type(graphs)
    assert (other.store["x"].device, other.device, other.num_graphs) == (META, META, 2)
    assert moved["y"].device == META


def test_what_moves_tensors_is_asked_for_those_of_objects_too():
    sent: list[torch.Tensor] = []

    def send(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        sent.extend(tensors)
        return [tensor.to(META) for tensor in tensors]

    moving.moved([Graphs(half(), 2), half()], META, send)
    assert len(sent) == 2


def test_a_class_of_tensors_is_a_leaf():
    tensor = torch.ones(3).as_subclass(Labelled)
    assert type(moving.moved([tensor], META)[0]) is Labelled


def with_unknown_field() -> Output:
    output = Output(half())
    output.later = Unknown(half())
    return output


@pytest.mark.parametrize("make", [
    lambda: Unknown(half()), lambda: {"a": [Unknown(half())]}, with_unknown_field,
])  # fmt: skip
def test_an_unknown_object_with_tensors_is_refused_in_one_line(make):
    nest = make()
    for act in (lambda: moving.moved(nest, META), lambda: nested.mapped(nest, torch.Tensor.float)):
        with pytest.raises(
            RequestError, match=r"Unknown .* tensor at .inner.*register_pytree_node"
        ) as e:
            act()
        assert "\n" not in str(e.value)


def test_rows_are_those_that_parts_share_or_as_an_object_says():
    images = [torch.ones(3, 9, 9)] * 8
    boxes = [{"boxes": torch.ones(n, 4)} for n in range(8)]
    rows = torch.ones(8, 2)
    for batch in (
        (tuple(images), ({},) * 8), (images, boxes), (images, [*range(8)]), [rows, rows[:, 0]],
        {"x": images, "y": rows}, Pair(rows, rows), [[rows, rows], rows], {"x": rows, "size": (2,)},
    ):  # fmt: skip
        assert nested.num_rows(batch) == 8
    for batch in (images, [(torch.ones(3), 5)] * 8, [rows, rows], {"at": torch.ones(4), "x": rows}):
        assert nested.num_rows(batch, expected=8) == 8
    assert nested.num_rows((rows[:1], rows[:1]), expected=1) == 1
    assert nested.num_rows({"n": torch.tensor(3), "x": torch.ones(5, 2)}) == 5
    assert nested.num_rows(pack_sequence([torch.ones(3), torch.ones(1)])) == 2
    assert nested.num_rows([Graphs(torch.ones(7, 2), 3)]) == 3
    assert nested.num_rows(Output(half())) == 4
    assert nested.num_rows("nothing") == 1


def test_parts_of_a_batch_are_of_its_type():
    first, second = nested.chunks({"o": Output(torch.arange(4)), "l": deque([torch.ones(2)])}, 2)
    assert first["o"].logits.tolist() == [0, 1]
    assert second["o"].beside.tolist() == [3, 4]
    assert type(second["l"]) is deque
    with pytest.raises(RequestError, match="packed sequence"):
        nested.chunks([pack_sequence([torch.ones(2), torch.ones(2)])], 2)
    with pytest.raises(RequestError, match="Graphs"):
        nested.chunks(Graphs(torch.ones(4), 2), 2)
