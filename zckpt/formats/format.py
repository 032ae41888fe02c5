"""What a format on disk is: one object that finds, reads, lays out, checks, strips and recuts its checkpoints.

`registry` holds one object for each format, and other packages add theirs; nothing else knows which formats there are.
This module is data and defaults only. The modules that do the work are imported when a method needs them, so that the
list of all formats with their options costs milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from zckpt.errors import ShardError, SourceError, UnknownFormatError, UnsupportedError
from zckpt.immutable import immutable, mutable

if TYPE_CHECKING:
    from zckpt.engine.checking import Sum
    from zckpt.engine.targets import TargetFile
    from zckpt.formats.stripping import Request, Stripping
    from zckpt.state import Checkpoint, GivenNames, SourceFile
    from zckpt.storage.ownership import Owned

ROOTS, TAG, TP_RULES = "roots", "tag", "tp_rules"
"""What a search may be given beside a path, and only some formats have a use for."""


@immutable
class Search:
    """What the user wants opened.

    Parameters
    ----------
    path : Path
    roots : tuple of Path
        The same directory on other nodes.
    tag : str or None
        Which checkpoint of a run directory.
    tp_rules : Path or None
        A file with the rules of tensor-parallel slices.
    names : sequence of str or None
        Names of the optimizer's parameters in its order; a format that knows the names ignores it.
    """

    path: Path
    roots: tuple[Path, ...] = ()
    tag: str | None = None
    tp_rules: Path | None = None
    names: GivenNames = None

    @property
    def given(self) -> frozenset[str]:
        """What was given that not every format understands."""
        return frozenset(name for name in (ROOTS, TAG, TP_RULES) if getattr(self, name) not in (None, ()))


@immutable
class Found:
    """A checkpoint that a format recognises.

    Parameters
    ----------
    place : object
        Whatever the format's `read` and `survey` need to know of where it is.
    sure : bool
        False: other formats are to be asked, and the checkpoint is theirs if one of them is sure.
    """

    place: Any
    sure: bool = True


@immutable
class NearMiss:
    """Something that a format knows, but cannot open.

    Parameters
    ----------
    message : str
        What it is, to follow the name of the source: "is one rank's file of a DeepSpeed checkpoint".
    advice : str or None
        What to do about it.
    intact : bool
        Whether it is whole, and zckpt has no way to read it; such an error has the exit status 5.
    code : str or None
        Of the finding of `verify` that it is, where something is missing.
    expected : str or None
        What should be there.
    """

    message: str
    advice: str | None = None
    intact: bool = False
    code: str | None = None
    expected: str | None = None

    def error(self, path: Path) -> SourceError:
        """Return the error to raise for a path of which no format is sure."""
        kind = UnsupportedError if self.intact else UnknownFormatError if self.code is None else ShardError
        return kind(self.message, path=path, expected=self.expected, advice=self.advice, code=self.code)


@immutable
class TargetFiles:
    """The files of a target, as `lay_out` and `recut` give them.

    Parameters
    ----------
    files : collection of TargetFile
        In the target directory; the only one is the target itself where `is_file`.
    outside : sequence of TargetFile
        Small ones of literals only that go into the target's parent, replacing what is there.
    is_file : bool
    notes : sequence of str
        What to know of the target.
    restated : collection of str, or None
        Keys of the source's metadata that the target says in another form, or of which the notes speak. None: no key
        has to arrive, for ranks that the target does not have hold some of their own.
    copied : collection of str
        Names of files that are copies of the source's as they are, whatever is in them.
    replaceable : callable
        Tells a name of a file that the format does not own, but a target that is to be replaced may have as well.
    in_floats : bool
        Whether quantised state is cut otherwise than in the source, so that what its codes stand for is to be compared.
    rounded : mapping of str to collection of str
        Slots of parameters that were rounded once more, and whose values are not the source's.
    keeps_rest : bool
        Whether the optimizer's state dict has further keys where its `load_state_dict` looks for them.
    check : callable or None
        Holds values of the source against each other beyond masters and weights; returns how many elements it compared.
    names : sequence of str or None
        Of the parameters of the target's optimizer, in the order in which it numbers them and to which it is proven;
        None: as the target itself says.
    """

    files: Collection[TargetFile]
    outside: Sequence[TargetFile] = ()
    is_file: bool = False
    notes: Sequence[str] = ()
    restated: Collection[str] | None = frozenset()
    copied: Collection[str] = frozenset()
    replaceable: Callable[[str], bool] = lambda _: False
    check: Callable[[], int] | None = None
    names: GivenNames = None
    in_floats: bool = False
    keeps_rest: bool = False
    rounded: Mapping[str, Collection[str]] = field(default_factory=dict)


@immutable
class Job:
    """What is to be written.

    Parameters
    ----------
    checkpoint : Checkpoint
    source, target : Path
        As the user named them.
    options : object
        One of the format's `options`, or of its `recut_options`.
    roots : tuple of Path
        The same source on other nodes.
    """

    checkpoint: Checkpoint
    source: Path
    target: Path
    options: Any
    roots: tuple[Path, ...] = ()


@mutable
class Survey:
    """Files that can be read, errors about the others, and whose files they are, if that can be told."""

    files: list[SourceFile] = field(default_factory=list)
    errors: list[SourceError] = field(default_factory=list)
    format: Format | None = None


class Format(Protocol):
    """A format on disk. Subclass it; everything but `name`, `title`, `find` and `read` has a default.

    Who calls what, in which order:

    1. `open_checkpoint` calls `find` of the registered formats in turn, those of other packages last, until one is
       sure, then `read` of that one. Where none recognises the source it raises the first near miss. Below a directory
       that it has opened, the inventory calls `is_checkpoint` of folders from which nothing was read.
    2. `convert` opens its source, checks the user's options against `options`, then calls `lay_out` of the target's
       format, plans the files, writes them below a temporary name, opens those (`find`, `read`), holds them against the
       source, and names them. `owns` tells which directories `overwrite` may replace.
    3. `reshard` does the same with `recut_options` and `recut` of the source's own format, and `strip` with `strip`.
    4. Whoever copies or verifies calls `checks` for each file of the source. `verify` calls `survey` where `find`
       recognises a source that `read` cannot open.
    5. `diff` calls `follows` of every format for each setting that differs.

    No method reads or writes the elements of tensors; the engine does, from what `read` and the `lay_out`s return.
    What a format knows of the meaning of values in its files (which ones the inventory need not look for elsewhere) it
    gives with each `SourceFile`, as `rules`.
    """

    name: str
    """What `Checkpoint.format` says, and `--to` takes."""

    title: str
    """What people call it, a few words."""

    reads: Sequence[tuple[str, str]] = ()
    """What of it is read, for the table of docs/supported.md: variants, and details of each. By default the title."""

    writes: str = ""
    """What `convert` makes of a target, one line; empty: it is not written."""

    takes: frozenset[str] = frozenset()
    """Which of `ROOTS`, `TAG` and `TP_RULES` a search for it may be given; given another, it is not asked."""

    options: type | None = None
    """A frozen dataclass of `option` fields: what `lay_out` leaves to choose."""

    recut_options: type | None = None
    """The same for `recut`; None: `reshard` refuses the format."""

    owns: Owned | None = None
    """Which directories hold nothing but its files, so that they may be replaced; None: nothing is written in it."""

    family: str = ""
    """Formats of one family keep the names that wrappers gave to parameters, as their programs look for them."""

    keeps_ranks: bool = False
    """Whether a target has each rank's own weights where the source has them, rather than rounded masters."""

    every_name: bool = False
    """Whether its programs look for tensors under each name that a model has in memory: tied ones, an adapter's."""

    keeps_optimizers: bool = False
    """Whether a target has several optimizers apart, where the source has several."""

    needs_groups: bool = True
    """Whether a target has state only of parameters whose param group is known."""

    own_metadata: frozenset[str] = frozenset()
    """Keys of `Checkpoint.metadata` that its program keeps for itself; `load` returns the others as the user's own."""

    fingerprinted: bool = False
    """Whether `convert` records the fingerprint of a target by default."""

    lists_files: bool = False
    """Whether it has a list of all files of its directory, so that no other program's are looked for in it."""

    def find(self, search: Search) -> Found | NearMiss | None:
        """Tell from names and few bytes whether a path is, or holds, a checkpoint of this format.

        Raises
        ------
        SourceError
            It is one for certain, and where it is cannot be told: `latest` names nothing, a rank's file is missing.
        """
        ...

    def read(self, found: Found, search: Search) -> Checkpoint:
        """Read the structure of what `find` found.

        Raises
        ------
        SourceError
            A file is damaged or missing, the files contradict each other, or hold what is not read.
        """
        ...

    def is_checkpoint(self, directory: Path) -> bool:
        """Tell by names alone whether a directory is a checkpoint of its own, or a damaged one."""
        try:
            return isinstance(self.find(Search(directory)), Found)
        except SourceError:
            return True

    def lay_out(self, job: Job) -> TargetFiles:
        """Return the files of a checkpoint of any format in this one.

        Raises
        ------
        UsageError
            An option that is needed, or cannot be.
        UnsupportedError
            The format has no place for something in the checkpoint.
        """
        raise UnsupportedError(f"{self.title} cannot be written", path=job.checkpoint.source)

    def checks(self, file: SourceFile) -> Iterable[Sum] | None:  # noqa: ARG002
        """Return the checksums that a file of a checkpoint holds of its own bytes; None: those of a torch archive.

        Raises
        ------
        SourceError
            The file cannot be read, or the structure that states them is damaged.
        """
        return None

    def contradictions(self, checkpoint: Checkpoint) -> Iterable[SourceError]:  # noqa: ARG002
        """Return where files say otherwise than what says what lies in them, so that opening need not read them."""
        return ()

    def survey(self, search: Search, found: Found | None) -> Survey | None:  # noqa: ARG002
        """Read every file by itself, where the whole cannot be opened; None: all torch and safetensors files are.

        Parameters
        ----------
        search : Search
        found : Found or None
            What `find` returned; None: it raised an error.
        """
        return None

    def slot_names(self, checkpoint: Checkpoint, source: Path) -> list[str]:  # noqa: ARG002
        """Return the names of all slots that `strip` can take out of a source."""
        return checkpoint.slot_names()

    def strip(self, checkpoint: Checkpoint, source: Path, request: Request) -> Stripping:  # noqa: ARG002
        """Return what becomes of the files of a checkpoint without what is to go.

        Raises
        ------
        UnsupportedError
            Nothing is taken out of this format.
        """
        raise UnsupportedError(
            "this format cannot be stripped", path=checkpoint.source, found=self.name,
            advice="`zckpt consolidate` writes only the model; `zckpt formats` lists those that can be stripped",
        )  # fmt: skip

    def renames(self, checkpoint: Checkpoint) -> bool:  # noqa: ARG002
        """Tell whether `recut` makes one model of a checkpoint whose tensors have other names now."""
        return False

    def recut(self, job: Job) -> TargetFiles:
        """Return the files of a checkpoint of this format, cut for other ranks.

        Where it `renames`, the checkpoint may have other names than its files, and no `origin`.

        Raises
        ------
        UsageError
            An option that cannot be.
        UnsupportedError
            It cannot be cut for others.
        """
        is_for_ranks = self.options is not None and "world_size" in self.options.__annotations__
        raise UnsupportedError(
            "only checkpoints of DeepSpeed (except universal ones) and nanochat, and Megatron's legacy files, can be "
            "resharded",
            path=job.checkpoint.source,
            found=self.name,
            advice=f"`zckpt convert --to {self.name} --world-size N` writes it for N ranks" if is_for_ranks
            else "use `zckpt convert`; any number of ranks can load its targets",
        )  # fmt: skip

    def follows(self, key: str, values: tuple[object, object], sides: tuple[Checkpoint, Checkpoint]) -> bool:  # noqa: ARG002
        """Tell whether a setting that differs between two checkpoints only says how each is cut or stored.

        Parameters
        ----------
        key : str
            As `diff` prints it: `metadata.ds_config.zero_optimization.stage`.
        values : (object, object)
            None where a side does not have it.
        sides : (Checkpoint, Checkpoint)
        """
        return False


class InFolder(Format):
    """A format in a folder of its own, whose modules are imported when needed.

    `directory` finds it, `reader` reads it, `writer` lays it out.
    """

    def module(self, name: str) -> Any:  # noqa: ANN401  # with functions of its own
        """Return a module of the folder."""
        return import_module(f"{type(self).__module__}.{name}")

    def find(self, search: Search) -> Found | NearMiss | None:
        """Return what `directory.find` finds."""
        answer = self.module("directory").find(search)
        return answer if answer is None or isinstance(answer, NearMiss) else Found(answer)

    def read(self, found: Found, search: Search) -> Checkpoint:
        """Return what `reader.read` makes of a place and the user's names."""
        checkpoint: Checkpoint = self.module("reader").read(found.place, names=search.names)
        return checkpoint

    def lay_out(self, job: Job) -> TargetFiles:
        """Return what `writer.lay_out` does, if the format is written."""
        written: TargetFiles = self.module("writer").lay_out(job) if self.writes else super().lay_out(job)
        return written


class Strippable(InFolder):
    """One that `strip` in the folder takes slots out of."""

    def strip(self, checkpoint: Checkpoint, source: Path, request: Request) -> Stripping:
        """Return what `strip.strip` does."""
        stripping: Stripping = self.module("strip").strip(checkpoint, source, request)
        return stripping
