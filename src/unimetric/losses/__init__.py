"""One file per loss: `loss(embeddings (B, D), labels (B,), memory=None) -> scalar`.

A loss whose evaluation is not by the cosine defines `placed(embeddings) -> (points, options)`. The
points are searched in `Space(points, ..., **options)`, and `options["geometry"]` names the geometry.
A loss with trained parameters may set `lr`, and `group` for other options of its parameter group.
"""
