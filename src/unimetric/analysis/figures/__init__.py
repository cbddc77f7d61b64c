"""Figures of universal metric learning, one file each."""
