"""Checkpoints of a run as one store: files as chunks, of which each is kept once, or as its difference to a prediction.

STORE/store.json            what it is, and of which version
STORE/000001.chunks         what the first checkpoint added: chunks, end to end
STORE/000001.index          its files, and of which chunks they consist; it appears last, in one step
STORE/000002.chunks ...

A prediction is ranges of other files of the store, so that no format is needed to read one. Who packs has found them.
"""
