"""One choice's output: rows merged in order, cut at stop strings, made into deltas, queued.

Knows no worker, no HTTP and no shape of an answer.
"""
