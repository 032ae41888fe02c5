"""The opcodes that call something and give an object its state. Nothing is called: see `rebuild`."""

from __future__ import annotations

from zckpt.errors import PickleError
from zckpt.torchfile.arrays import NumpyArray, NumpyDType
from zckpt.torchfile.objects import DefaultMapping, Global, Namespace, Object, OrderedMapping
from zckpt.torchfile.pickle_machine import Machine, opcode
from zckpt.torchfile.pickle_structure import cannot
from zckpt.torchfile.pickle_values import MAX_NAME_LINE, utf8
from zckpt.torchfile.rebuild import NAMESPACE, Context, fill_array
from zckpt.torchfile.tensors import MetaTensor, Tensor


@opcode(b"R")
def reduce(machine: Machine) -> None:
    """Run REDUCE: a known function gives plain data or its node, any other an inert object."""
    stack = machine.stack
    args, function = stack.pop(), stack[-1]
    if type(args) is not tuple:
        raise PickleError("a call", expected="a tuple of arguments", found=type(args).__name__)
    builder = machine.builders.get(id(function))
    if builder is not None:
        stack[-1] = builder(args, machine.context)
    else:
        stack[-1] = Object(callee(function), args)


def callee(function: object) -> Global | Object:
    """Return what is to be called, if it could be a class or function."""
    if not isinstance(function, (Global, Object)):
        raise cannot(function, "called")
    return function


def new(cls: object, args: object, how: str) -> object:
    """Return an instance made by `cls.__new__`."""
    if type(args) is not tuple:
        raise PickleError("a call", expected="a tuple of arguments", found=type(args).__name__)
    if cls == NAMESPACE and not args:
        return Namespace()
    return Object(callee(cls), args, how=how)


@opcode(b"\x81")
def newobj(machine: Machine) -> None:
    """Run NEWOBJ."""
    args = machine.stack.pop()
    machine.stack[-1] = new(machine.stack[-1], args, "newobj")


@opcode(b"\x92")
def newobj_ex(machine: Machine) -> None:
    """Run NEWOBJ_EX."""
    kwargs, args = machine.stack.pop(), machine.stack.pop()
    if type(kwargs) is not dict or type(args) is not tuple:
        raise PickleError("a call", expected="a tuple and a dict of arguments")
    machine.stack[-1] = Object(callee(machine.stack[-1]), args, kwargs, how="newobj_ex")


@opcode(b"i")
def inst(machine: Machine) -> None:
    """Run INST: class from two lines of text, arguments since the mark."""
    module = utf8(machine.line(MAX_NAME_LINE))
    cls = machine.find_global(module, utf8(machine.line(MAX_NAME_LINE)))
    args = machine.since_mark()
    machine.stack.append(new(cls, tuple(args), "inst"))


@opcode(b"o")
def obj(machine: Machine) -> None:
    """Run OBJ: class and arguments since the mark."""
    cls, *args = machine.since_mark() or [None]
    machine.stack.append(new(cls, tuple(args), "obj"))


@opcode(b"Q")
def binpersid(machine: Machine) -> None:
    """Run BINPERSID."""
    if machine.persistent is None:
        raise PickleError("a persistent id where none can be")
    machine.stack[-1] = machine.persistent(machine.stack[-1])


@opcode(b"P")
def persid(_: Machine) -> None:
    """Run PERSID: an id as text, which torch does not write."""
    raise PickleError("a persistent id that torch does not write", found="text")


@opcode(b"b")
def build(machine: Machine) -> None:
    """Run BUILD: give the object below the state on top."""
    state = machine.stack.pop()
    set_state(machine.stack[-1], state, machine.context)


def set_state(target: object, state: object, context: Context) -> None:
    """Keep the state of an object; an object may be given one state only."""
    if type(target) is Object and not target.has_state:
        target.state, target.has_state = state, True
    elif type(target) is NumpyArray and target.dtype_node is None:
        fill_array(target, state, context)
    elif type(target) is NumpyDType and target.state is None and isinstance(state, tuple):
        target.state = state
    elif type(target) is Namespace and type(state) is dict and not target:
        target.update(state)
    elif isinstance(target, (OrderedMapping, DefaultMapping)) and target.state is None:
        target.state = state
    elif isinstance(target, (Tensor, MetaTensor)) and target.state is None:
        # Nodes are frozen for their readers; a class with its own __reduce__ gets its state only here.
        object.__setattr__(target, "state", state)
    else:
        raise cannot(target, "given a state, or a second one")
