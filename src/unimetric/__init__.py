"""Unimetric: one image embedding that still works on classes, shifts and datasets it has never seen, and the proof of it."""
