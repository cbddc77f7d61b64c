"""Run folders to artifacts."""
