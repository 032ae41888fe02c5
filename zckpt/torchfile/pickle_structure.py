"""The opcodes that build structure: containers and the memo."""

from __future__ import annotations

from zckpt.errors import PickleError
from zckpt.torchfile.objects import Namespace, Object
from zckpt.torchfile.pickle_machine import Machine, opcode
from zckpt.torchfile.pickle_values import digits, unsigned


def cannot(target: object, what: str) -> PickleError:
    """Return the error for an opcode that does not fit the object it changes."""
    return PickleError(f"a {type(target).__name__} cannot be {what}")


@opcode(b"(")
def mark(machine: Machine) -> None:
    """Run MARK."""
    machine.marks.append(machine.stack)
    machine.stack = []


@opcode(b"0")
def pop(machine: Machine) -> None:
    """Run POP: of the top of the stack, or of a mark that has nothing after it."""
    if machine.stack:
        machine.stack.pop()
    else:
        machine.since_mark()


@opcode(b"1")
def pop_mark(machine: Machine) -> None:
    """Run POP_MARK."""
    machine.since_mark()


@opcode(b"2")
def dup(machine: Machine) -> None:
    """Run DUP."""
    machine.stack.append(machine.stack[-1])


@opcode(b"h")
def binget(machine: Machine) -> None:
    """Run BINGET."""
    try:
        machine.stack.append(machine.memo[machine.data[machine.pos]])
    except KeyError:
        raise PickleError("the memo has no such entry", found=machine.data[machine.pos]) from None
    machine.pos += 1


@opcode(b"j")
def long_binget(machine: Machine) -> None:
    """Run LONG_BINGET."""
    recall(machine, unsigned(machine, 4))


@opcode(b"g")
def get(machine: Machine) -> None:
    """Run GET."""
    recall(machine, digits(machine.line(20)))


def recall(machine: Machine, index: int) -> None:
    """Push what the memo holds at `index`."""
    try:
        machine.stack.append(machine.memo[index])
    except KeyError:
        raise PickleError("the memo has no such entry", found=index) from None


@opcode(b"q")
def binput(machine: Machine) -> None:
    """Run BINPUT."""
    machine.memo[machine.data[machine.pos]] = machine.stack[-1]
    machine.pos += 1


@opcode(b"r")
def long_binput(machine: Machine) -> None:
    """Run LONG_BINPUT."""
    machine.memo[unsigned(machine, 4)] = machine.stack[-1]


@opcode(b"p")
def put(machine: Machine) -> None:
    """Run PUT."""
    machine.memo[digits(machine.line(20))] = machine.stack[-1]


@opcode(b"\x94")
def memoize(machine: Machine) -> None:
    """Run MEMOIZE."""
    machine.memo[len(machine.memo)] = machine.stack[-1]


@opcode(b"]")
def empty_list(machine: Machine) -> None:
    """Run EMPTY_LIST."""
    machine.stack.append([])


@opcode(b"}")
def empty_dict(machine: Machine) -> None:
    """Run EMPTY_DICT."""
    machine.stack.append({})


@opcode(b")")
def empty_tuple(machine: Machine) -> None:
    """Run EMPTY_TUPLE."""
    machine.stack.append(())


@opcode(b"\x8f")
def empty_set(machine: Machine) -> None:
    """Run EMPTY_SET."""
    machine.stack.append(set())


@opcode(b"l")
def make_list(machine: Machine) -> None:
    """Run LIST."""
    items = machine.since_mark()
    machine.stack.append(items)


@opcode(b"t")
def make_tuple(machine: Machine) -> None:
    """Run TUPLE."""
    items = machine.since_mark()
    machine.stack.append(tuple(items))


@opcode(b"\x85")
def tuple1(machine: Machine) -> None:
    """Run TUPLE1."""
    machine.stack[-1] = (machine.stack[-1],)


@opcode(b"\x86")
def tuple2(machine: Machine) -> None:
    """Run TUPLE2."""
    last = machine.stack.pop()
    machine.stack[-1] = (machine.stack[-1], last)


@opcode(b"\x87")
def tuple3(machine: Machine) -> None:
    """Run TUPLE3."""
    last, middle = machine.stack.pop(), machine.stack.pop()
    machine.stack[-1] = (machine.stack[-1], middle, last)


@opcode(b"d")
def make_dict(machine: Machine) -> None:
    """Run DICT."""
    items = machine.since_mark()
    machine.stack.append({})
    set_items(machine, items)


@opcode(b"\x91")
def make_frozenset(machine: Machine) -> None:
    """Run FROZENSET."""
    items = machine.since_mark()
    machine.stack.append(set())
    add_members(machine, items)
    machine.stack[-1] = frozenset(machine.stack[-1])  # type: ignore[call-overload]  # the set just pushed


@opcode(b"a")
def append(machine: Machine) -> None:
    """Run APPEND."""
    item = machine.stack.pop()
    extend(machine, [item])


@opcode(b"e")
def appends(machine: Machine) -> None:
    """Run APPENDS."""
    extend(machine, machine.since_mark())


def extend(machine: Machine, items: list[object]) -> None:
    """Append to the list on top of the stack, or to an object that behaves as one."""
    target = machine.stack[-1]
    if type(target) is list:
        target.extend(items)
    elif type(target) is Object:
        target.items.extend(items)
    else:
        raise cannot(target, "appended to")


@opcode(b"s")
def setitem(machine: Machine) -> None:
    """Run SETITEM."""
    value, key = machine.stack.pop(), machine.stack.pop()
    set_items(machine, [key, value])


@opcode(b"u")
def setitems(machine: Machine) -> None:
    """Run SETITEMS."""
    set_items(machine, machine.since_mark())


def set_items(machine: Machine, items: list[object]) -> None:
    """Set keys and values, which alternate, in the mapping on top of the stack."""
    target = machine.stack[-1]
    if len(items) % 2:
        raise PickleError("a dict with a key and no value")
    keys = items[::2]
    if type(target) is Object:
        target.entries.extend(zip(keys, items[1::2], strict=True))
        return
    if not isinstance(target, dict) or type(target) is Namespace:
        raise cannot(target, "indexed")
    check = machine.context.guard.check_key
    for key, value in zip(keys, items[1::2], strict=True):
        if type(key) is not str:
            check(target, key)
        target[key] = value


@opcode(b"\x90")
def additems(machine: Machine) -> None:
    """Run ADDITEMS."""
    add_members(machine, machine.since_mark())


def add_members(machine: Machine, items: list[object]) -> None:
    """Add to the set on top of the stack, or to an object that behaves as one."""
    target = machine.stack[-1]
    if type(target) is Object:
        target.items.extend(items)
        return
    if type(target) is not set:
        raise cannot(target, "added to")
    for item in items:
        machine.context.guard.check_key(target, item)
        target.add(item)
