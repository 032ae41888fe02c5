"""Globals of the standard library and of numpy that become plain data or a node, and what it may cost.

A builder takes the arguments that a pickle passes to a function and returns what stands for the result: None refuses
them, and of NotImplemented the call is kept, as that of any function that is in no table: an inert `Object`. The torch
table is in `rebuild_torch`.

A few bytes of a pickle can copy or hash something large again and again; so everything that costs more
than its opcode is counted, and the sum must stay within a small multiple of the pickle's size.

Hashing is the one thing done with objects of the file: tuples could nest so deep or share so much that
it never ends, or thousands of keys could have one hash. Strings and bytes hash with a secret of the
process, and nodes by identity or by such strings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zckpt.errors import PickleError
from zckpt.state.spans import Shape
from zckpt.torchfile import nodes
from zckpt.torchfile.nodes import Args, NumpyArray, NumpyDType, NumpyScalar

FREE_WORK = 1 << 16
WORK_PER_BYTE = 2
"""An honest pickle copies or hashes each of its bytes about once."""

MAX_KEY_DEPTH = 8
"""Levels of tuples in a key: real ones have one or two."""

MAX_KEY_NODES = 1000
"""Elements of a key with every level expanded: bounds the time to hash it, and its length as text."""

TEXT_PER_NODE = 64
"""Characters of a text in a nested key that count as one more element: the same text may be there again and again."""

MAX_COLLISIONS = 64
"""Keys of one container with one hash: real data has one or two (-1 and -2), a chain of n costs n^2."""

SMALL = 1 << 60
"""Integers below hash to themselves, so that no two collide."""

SAFE = frozenset(
    {str, bytes, bool, type(None), nodes.Object, nodes.Storage, NumpyScalar, NumpyDType, NumpyArray}
    | nodes.NAMES
    | nodes.TENSORS
)
NUMBERS = frozenset({int, float, complex})
NESTS = frozenset({tuple, nodes.Size, frozenset})


class Context:
    """What builders may know of the file; counts the work of one pickle and checks its keys.

    Parameters
    ----------
    nbytes : int, bytes
        Size of the pickle.
    byteorder : str
        Of tensor data: `little` or `big`.
    """

    __slots__ = ("budget", "byteorder", "counts")

    def __init__(self, nbytes: int = 0, byteorder: str = "little") -> None:
        self.budget = FREE_WORK + WORK_PER_BYTE * nbytes
        self.byteorder = byteorder
        self.counts: dict[int, tuple[object, dict[int, int]]] = {}  # keeps containers, so that ids stay their own

    def spend(self, work: int) -> None:
        """Count the elements or bytes that are about to be copied or hashed.

        Raises PickleError: the pickle asks for more work than an honest one of its size.
        """
        self.budget -= work
        if self.budget < 0:
            raise PickleError(
                "it copies or hashes far more than it contains", advice="the file was built to exhaust its reader"
            )

    def check_key(self, container: object, key: object) -> None:
        """Refuse a key that cannot be hashed, or that was made to be slow.

        Raises PickleError: with the reason.
        """
        if type(key) in SAFE or (type(key) is int and -SMALL < key < SMALL):
            return
        left = measure(key, MAX_KEY_NODES, MAX_KEY_DEPTH)
        if type(key) in NESTS:
            self.spend(MAX_KEY_NODES - left)
        _, counts = self.counts.setdefault(id(container), (container, {}))
        value = hash(key)
        counts[value] = count = counts.get(value, 0) + 1
        if count > MAX_COLLISIONS:
            raise PickleError("too many keys with one hash", advice="the file was built to exhaust its reader")


def measure(key: object, nodes: int, depth: int) -> int:
    """Return what is left of a budget of `nodes` after walking a key."""
    kind = type(key)
    if kind not in NESTS:
        if kind not in SAFE and kind not in NUMBERS:
            raise PickleError(f"a {kind.__name__} is used as a key", expected="something hashable")
        return nodes - 1 - (len(key) // TEXT_PER_NODE if isinstance(key, (str, bytes)) else 0)
    if depth == 0:
        raise PickleError("a key is nested too deeply", expected=f"at most {MAX_KEY_DEPTH} levels")
    for element in key:  # type: ignore[attr-defined]  # one of NESTS
        nodes = measure(element, nodes, depth - 1)
        if nodes < 0:
            raise PickleError("a key is too large", expected=f"at most {MAX_KEY_NODES} elements")
    return nodes - 1


Builder = Callable[[Args, Context], object]

MAX_DIMENSIONS = 64
"""Dimensions of a tensor or array: numpy and torch stop at 64."""

MAX_ELEMENTS = (1 << 63) - 1
"""Elements of a tensor: torch counts in int64."""

HASHED = 2
"""Work for a member of a new set or mapping: at least the bytes that it takes in a pickle."""


def integers(value: object, what: str) -> Shape:
    """Return a shape or strides as a tuple of non-negative integers that fit int64."""
    if not isinstance(value, (tuple, list)) or len(value) > MAX_DIMENSIONS:
        raise PickleError(f"{what} of a tensor", expected="a tuple of integers", found=type(value).__name__)
    for number in value:
        if type(number) is not int or not 0 <= number <= MAX_ELEMENTS:
            raise PickleError(f"{what} of a tensor", expected="integers from 0 to 2**63-1", found=f"{number!r:.40}")
    return tuple(value)


def ordered_dict(args: Args, context: Context) -> object:
    """Build `OrderedDict()` or, as Python 2 wrote it, `OrderedDict([[key, value], ...])`."""
    mapping, pairs = nodes.OrderedMapping(), args[0] if args else ()
    if len(args) > 1 or not isinstance(pairs, (list, tuple)):
        return None
    context.spend(HASHED * len(pairs))
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            return None
        context.check_key(mapping, pair[0])
        mapping[pair[0]] = pair[1]
    return mapping


def default_dict(args: Args, _: Context) -> object:
    """Build `defaultdict(factory)`."""
    match args:
        case () | (nodes.Global() | nodes.Object() | None,):
            return nodes.DefaultMapping(*args)
    return None


def make_set(args: Args, context: Context) -> set[object] | None:
    """Build a `set`."""
    found: set[object] = set()
    elements = args[0] if args else ()
    if len(args) > 1 or not isinstance(elements, (list, tuple, set, frozenset)):
        return None
    context.spend(HASHED * len(elements))
    for element in elements:
        context.check_key(found, element)
        found.add(element)
    return found


def make_bytes(args: Args, context: Context) -> bytes | None:
    """Build `bytes()` or `bytes(data)`; a length is refused, for it could be any.

    In protocols 0 to 2 they are `_codecs.encode(text, "latin1")`.
    """
    match args:
        case ():
            return b""
        case (str(text), "latin1" | "latin-1"):
            context.spend(len(text))
            try:
                return text.encode("latin-1")
            except UnicodeEncodeError:
                raise PickleError("bytes are written as text that is not latin-1") from None
        case (bytes() | bytearray() as data,):
            context.spend(len(data))
            return bytes(data)
        case (list() as values,):
            context.spend(len(values))
            if not all(isinstance(value, int) and 0 <= value <= 255 for value in values):
                raise PickleError("bytes written as a list", expected="integers from 0 to 255")
            return bytes(values)
    return None


def as_kind(kind: Callable[[Any], object], builder: Builder) -> Builder:
    """Return the builder of what another builds, as another kind."""

    def build(args: Args, context: Context) -> object:
        found = builder(args, context)
        return None if found is None else kind(found)

    return build


def make_complex(args: Args, _: Context) -> object:
    """Build a `complex` from two floats."""
    match args:
        case (float(real), float(imaginary)):
            return complex(real, imaginary)
    return None


def make_slice(args: Args, _: Context) -> object:
    """Build a `slice` of integers."""
    return slice(*args) if len(args) == 3 and all(arg is None or type(arg) is int for arg in args) else NotImplemented


def make_range(args: Args, _: Context) -> object:
    """Build a `range`."""
    match args:
        case (int(start), int(stop), int(step)) if step:
            return range(start, stop, step)
    return None


def reconstructor(args: Args, _: Context) -> object:
    """Build what `copyreg._reconstructor(cls, base, state)` would: an instance in protocols 0 and 1."""
    match args:
        case (nodes.Global() | nodes.Object() as cls, _, _):
            return nodes.Namespace() if cls == NAMESPACE else nodes.Object(cls, args[1:], how="reconstructor")
    return None


def numpy_dtype(args: Args, _: Context) -> object:
    """Build `numpy.dtype(code, align, copy)`."""
    match args:
        case ():
            return None
        case (str(code), *flags) if code:
            return NumpyDType(code, tuple(flags))
    return NotImplemented


def numpy_scalar(args: Args, context: Context) -> object:
    """Build `numpy.core.multiarray.scalar(dtype, data)`."""
    match args:
        case (NumpyDType() as dtype, value):
            data, state = raw(value, context), dtype.state or ()
            if not isinstance(data, bytes) or len(state) > 8 or any(part is not None for part in state[2:5]):
                return NotImplemented
            if dtype.itemsize is not None and len(data) != dtype.itemsize:
                raise PickleError("numpy scalar", expected=f"{dtype.itemsize} bytes", found=len(data))
            return NumpyScalar(dtype.text, data)
    return NotImplemented


def numpy_array(args: Args, _: Context) -> object:
    """Build the empty array that `numpy.core.multiarray._reconstruct` makes; its state fills it."""
    match args:
        case (nodes.Global(name="recarray"), _, _):
            return NotImplemented  # its dtype is of numpy's class `record`
        case (nodes.Global() as cls, _, _):
            return NumpyArray(cls=cls)
    return None


def numpy_buffer(args: Args, context: Context) -> object:
    """Build the array of `numpy._core.numeric._frombuffer(buffer, dtype, shape, order)`, protocol 5."""
    match args:
        case (data, NumpyDType() as dtype, shape, "C" | "F" as order, *others) if not any(others):
            array = NumpyArray(cls=nodes.Global("numpy", "ndarray"))
            sizes = integers((shape,) if type(shape) is int else shape, "shape")
            array.fill(sizes, dtype, raw(data, context), fortran_order=order == "F")
            return array
    return NotImplemented


def raw(data: object, context: Context) -> object:
    """Return the data of an array or scalar as bytes; a list of objects as it is."""
    if isinstance(data, (str, bytearray)):
        context.spend(len(data))
        # Python 2 strings were read as UTF-8
        return data.encode("utf-8", "surrogatepass") if isinstance(data, str) else bytes(data)
    return data


NAMESPACE = nodes.Global("argparse", "Namespace")

BUILDERS: dict[tuple[str, str], Builder] = {
    ("collections", "OrderedDict"): ordered_dict,
    ("collections", "defaultdict"): default_dict,
    ("builtins", "set"): make_set,
    ("builtins", "frozenset"): as_kind(frozenset, make_set),
    ("builtins", "bytes"): make_bytes,
    ("builtins", "bytearray"): as_kind(bytearray, make_bytes),
    ("builtins", "complex"): make_complex,
    ("builtins", "slice"): make_slice,
    ("builtins", "range"): make_range,
    ("builtins", "xrange"): make_range,
    ("_codecs", "encode"): lambda args, context: make_bytes(args, context) if len(args) == 2 else None,
    ("copyreg", "_reconstructor"): reconstructor,
    ("numpy", "dtype"): numpy_dtype,
    ("numpy._core.multiarray", "scalar"): numpy_scalar,
    ("numpy._core.multiarray", "_reconstruct"): numpy_array,
    ("numpy._core.numeric", "_frombuffer"): numpy_buffer,
}

MODULES = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "torch.tensor": "torch._tensor",
    "numpy.core.multiarray": "numpy._core.multiarray",
    "numpy.core.numeric": "numpy._core.numeric",
}
"""Modules that have another name today, by the name older files use."""
