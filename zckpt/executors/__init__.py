"""Which processes do the work: forks, or those of Dask, MPI, Ray or torchrun, by a name on the command line.

    threads                     of this process, the default
    processes                   on_forks   of this machine; a command's default for much that is computed
    dask://HOST:PORT            on_dask    workers of a scheduler; dask:///FILE: of the scheduler that wrote FILE
    mpi                         on_mpi     under mpiexec, the other ranks
    ray                         on_ray     the cluster of RAY_ADDRESS, or that runs here, else one of this machine
    torchrun                    on_ranks   under torchrun, all ranks

Each is a `concurrent.futures.Executor` with `workers`, how many tasks it runs at once; `lost`, what it raises when
workers are gone; `end`, where workers can be told that nobody waits for what they run; and `settle`, where cancelled
tasks may still run. What a task is, `engine` knows alone. Packages are imported when they are asked for.

`using` connects to one. Where one program is started on every rank, `launch` makes the first one the driver, and the
others its workers.
"""
