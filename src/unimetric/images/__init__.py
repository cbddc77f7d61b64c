"""Tables of images, and images as tensors: decode, pack, crop, load."""

#: Default quality of JPEG and WebP in a pack, from 1 to 100.
QUALITY = 95
