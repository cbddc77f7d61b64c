"""One file a split: `split(table) -> Split`, which rows are trained on, which choose the best epoch, which are reported."""
