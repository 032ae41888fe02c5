"""Ranks that mpiexec started. The first drives, the others work; when one is lost, MPI ends all of them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import cast

from zckpt.errors import UsageError, require


@contextmanager
def ranks() -> Iterator[Executor | None]:
    """Yield the executor of all other ranks on the first, and None on the others, once the first has left it.

    Raises
    ------
    UsageError
        There is one rank only, or mpi4py is missing.
    """
    require("mpi4py.MPI", "mpi")
    from mpi4py import MPI
    from mpi4py.futures import MPICommExecutor

    if MPI.COMM_WORLD.Get_size() < 2:
        raise UsageError(
            "a single rank has no others to do the work",
            expected="`mpiexec -n N zckpt ... --executor mpi`, with N of 2 or more",
        )
    with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
        yield cast("Executor | None", executor)


@contextmanager
def pool() -> Iterator[Executor]:
    """Yield an executor of the ranks that `python -m mpi4py.futures` keeps, or that MPI starts.

    Raises MissingPackageError: it needs mpi4py.
    """
    require("mpi4py.MPI", "mpi")
    from mpi4py.futures import MPIPoolExecutor

    with MPIPoolExecutor() as executor:
        yield executor
