"""Run folders to findings: one file per command."""
