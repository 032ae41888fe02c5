"""Classes of fields behave as the dataclasses that they stand for."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace

import pytest

from zckpt.immutable import immutable, mutable


def classes(decorate):
    @decorate
    class Base:
        a: int
        absent: list[int] = field(default_factory=list)
        b: str = "b"
        note: str = field(default="", compare=False, repr=False)

    @decorate
    class More(Base):
        c: float = 0.5
        key: str = field(kw_only=True)

    return Base, More


@pytest.mark.parametrize(
    ("decorate", "usual"), [(immutable, dataclass(frozen=True, slots=True)), (mutable, dataclass(slots=True))]
)
def test_a_class_is_as_a_dataclass(decorate, usual):
    for ours, theirs in zip(classes(decorate), classes(usual), strict=True):
        key = {"key": "k"} if ours.__name__ == "More" else {}
        one, other = ours(1, **key), theirs(1, **key)
        assert repr(one) == repr(other)
        assert [each.name for each in fields(one)] == [each.name for each in fields(other)]
        assert ours.__match_args__ == theirs.__match_args__
        assert not hasattr(one, "__dict__")
        assert one == ours(1, [], "b", "another", **key)
        assert one != ours(1, [2], **key)
        assert one != ours(2, **key)
        assert (one == 1) is False
        assert ours(1, **key).absent is not ours(1, **key).absent
        assert replace(one, b="c") == ours(1, b="c", **key)
        assert copy.deepcopy(one) == one
        for wrong in ((), (1, [], "b", "", 2, 3, 4)):
            with pytest.raises(TypeError) as mine:
                ours(*wrong, **key)
            with pytest.raises(TypeError) as usually:
                theirs(*wrong, **key)
            assert str(mine.value).split("__init__")[1] == str(usually.value).split("__init__")[1]
    base, more = classes(decorate)
    assert base(1) != more(1, key="k")


@immutable
class Pair:
    first: int
    second: tuple[int, ...] = ()


@immutable(eq=False, repr=False, kw_only=True)
class Alone:
    first: int

    def __post_init__(self):
        if self.first < 0:
            raise ValueError("negative")


def test_what_is_immutable_stays_and_can_be_a_key():
    one = Pair(1, (2,))
    assert {one: 1}[Pair(1, (2,))] == 1
    with pytest.raises(FrozenInstanceError):
        one.first = 2
    with pytest.raises(FrozenInstanceError):
        del one.first
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(TypeError):
        hash(Pair(1, [2]))
    with pytest.raises(TypeError):
        hash(mutable(type("Changes", (), {"__annotations__": {"a": "int"}}))(1))


def test_what_is_not_compared_is_equal_to_itself_alone():
    one = Alone(first=1)
    assert one == one
    assert one != Alone(first=1)
    assert repr(one).startswith("<")
    with pytest.raises(ValueError, match="negative"):
        Alone(first=-1)
