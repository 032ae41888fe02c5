"""How elements get from spans to where they are wanted: planned exactly, moved in large reads, cast, checked, summed.

It knows bytes, boxes and element types; no format, and not what a parameter means. Workers, buffers and batches are
decided here and nowhere else.
"""
