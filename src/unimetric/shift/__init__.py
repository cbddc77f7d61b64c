"""How far test classes lie from training classes: distances, splits of growing distance, and scores over them."""
