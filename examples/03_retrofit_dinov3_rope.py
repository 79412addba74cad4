"""Put DINOv3's rotary encoding on a plain ViT, ramp it up, take it off again."""

import torch

from visionpos import config, retrofit

model = retrofit.create("vit_tiny_patch16_224", size_hw=(96, 160))
photo = torch.rand(1, 3, 96, 160)
plain = model(photo)
attachment = retrofit.attach(model, config.load_encoding("dinov3"), strength=0.0)
print("strength 0.0: bit-identical", torch.equal(model(photo), plain))
for strength in (0.5, 1.0):
    attachment.set_strength(strength)
    print(f"strength {strength}: outputs differ", not torch.equal(model(photo), plain))
retrofit.detach(model)
print("detached: bit-identical", torch.equal(model(photo), plain))
