"""Artifacts made of run folders."""
