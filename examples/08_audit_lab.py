"""The lab of an essay on positional geometry: a gap that moves the query alone cannot see distance in ALiBi."""

from visionpos.audit.lab import LAB_SCHEMES, lab

rows = lab()
assert all(row.agrees for row in rows), "a number is not the recorded one"
print(f"{sum(row.recorded is not None for row in rows)} recorded numbers reproduced")
print("change of attention weights".ljust(40), *(scheme.rjust(9) for scheme in LAB_SCHEMES))
for test, by, name in (
    ("shift", 17, "all positions move by 17"),
    ("query_gap", 50, "the query alone moves by 50"),
    ("key_gap", 50, "50 places open between two keys"),
):
    change = {row.scheme: row.computed for row in rows if (row.test, row.by) == (test, by)}
    print(name.ljust(40), *(f"{change[scheme]:9.6f}" for scheme in LAB_SCHEMES))
