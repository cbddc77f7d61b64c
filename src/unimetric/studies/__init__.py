"""Studies: run every combination of a grid, on this machine or on a cluster.

Finished runs are skipped.
"""
