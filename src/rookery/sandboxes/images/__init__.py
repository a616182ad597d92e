"""Images from which sandboxes are created.

    reference = parse_reference("python:3.12")
    image = await ImageFetcher().acquire(reference)    # fetched, verified and unpacked once
    image.folder, image.record.layers                  # directories for an overlay mount, lowest first

Promises:
- an image is found by name (in the store, an engine or a registry), in files, or built; names mean what they mean
  to Docker;
- it is fetched and unpacked once for all processes of a user on a machine;
- a malicious layer ends with an error: nothing is written outside the store, and nothing grows without a limit;
- a partially fetched image is never used, and an image in use is never removed.
"""
