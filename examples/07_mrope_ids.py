"""Where the vendor's rule and transformers part: text after a video that is longer than wide."""

from visionpos.vlm import Text, Video, family

clip = Video(size_hw=(56, 56), seconds=[second / 2 for second in range(16)])
prompt = [Text(tokens=2), clip, Text(tokens=3)]
for dialect in ("vendor", "transformers"):
    fam = family("qwen2_5_vl", dialect=dialect)
    stream = fam.stream(prompt)
    pos = fam.position_ids(stream)
    after = pos.ids[:, -3:].tolist()
    print(
        f"{dialect:12} time of the clip ends at {pos.ids[0, :-4].max().item()}, text after it {after[0]}"
    )
