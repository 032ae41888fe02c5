"""Elements held against elements, and what a checkpoint means whatever its format: digests, figures, differences.

It knows when two values are the same (bits, rounding, NaN) and under which names a state is compared.
"""
