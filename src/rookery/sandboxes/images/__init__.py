"""Images: what sandboxes are made from besides this machine's own system.

    reference = references.parse("python:3.12")
    use = await asking.Images().hold(reference)   # fetched, unpacked, verified, once; held until closed
    use.folder, use.record.layers                 # folders for an overlay, lowest first

Promises:
- an image is found by name (in the store, an engine, a registry), in files, or built; names mean what they mean to
  Docker;
- it is fetched and unpacked once for all who ask, in all processes of a user on a machine;
- hostile layers end as an error: nothing is written where it does not belong, nothing grows without a bound;
- what is half-made is never used, and what is used is never removed.
"""
