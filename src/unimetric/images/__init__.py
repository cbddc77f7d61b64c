"""Tables of images, and images as tensors: decode, pack, crop, load."""
