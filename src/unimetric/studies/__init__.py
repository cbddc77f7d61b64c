"""Studies: a grid of settings becomes runs, here or on a cluster; finished ones are skipped."""
