"""`python -m zckpt`, and the program: no signal comes while the command line is imported, or while Python ends."""

import _signal as signal  # type: ignore[import-not-found]  # without what `signal` imports

HELD = {signal.SIGINT, signal.SIGTERM}


def main() -> None:
    """Run the command line, which takes signals as long as it knows what to say."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    from zckpt.cli import main

    try:
        main()
    finally:
        for one in HELD:
            signal.signal(one, signal.SIG_IGN)  # what has come is of no use any more
            signal.signal(one, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)


if __name__ == "__main__":  # workers of mpi4py.futures import it under another name
    main()
