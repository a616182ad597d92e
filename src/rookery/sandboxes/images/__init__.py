"""Images from which sandboxes are created: find, fetch, unpack, store and remove them.

    reference = parse_reference("python:3.12")
    image = await ImageFetcher().acquire(reference)    # fetched, verified and unpacked once
    image.folder, image.record.layers                  # directories for an overlay mount, lowest first

Guarantees:
- an image is looked up by name (in the store, a container engine or a registry), read from files, or built from a
  Dockerfile; names have the same meaning as for Docker;
- an image is fetched and unpacked once for all processes of a user on a machine;
- a malicious layer is refused with an error: it can neither write outside the store nor exceed the size limits;
- a partially fetched image is never used, and an image in use is never removed.

Why this is our own code: `local` sandboxes work on machines without a container engine (Docker, Podman), so no
other program pulls and unpacks their images.

| part | modules | what a library would have to do |
|---|---|---|
| download | `registry`, `credentials` | resume downloads, ask credential helpers, keep secrets off other hosts |
| unpack | `unpacker`, `overlay` | whiteouts as overlayfs expects them, limits, an own process without privileges |
| store | `store`, `staging`, `file_locks`, `records` | share layers between processes, evict by last use |
| sources | `references`, `sources`, `engine_images`, `dockerfile` | files, engines and builds besides registries |
| fetching | `image_fetcher`, `fetch_process`, `installer`, `progress` | fetch once, in a child process |
| container engines | `engine_loader` | load an image into a Docker or Podman engine that does not have it |

The PyPI packages `oras` and `python-dxf` cover only the download, a tenth of the code, and not all of it: they
neither resume an interrupted download nor ask credential helpers. `docker` needs a container engine. None of them
unpacks layers; umoci and containerd do, but they are Go programs that users would have to install. umoci takes
twice as long to unpack an image (`python -m benchmarks docker`).
"""
