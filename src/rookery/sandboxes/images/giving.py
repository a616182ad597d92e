"""Gives a container engine an image that it does not have: for sandboxes that the engine makes.

Promises:
- it is done once, however many processes ask for the same image: the others wait;
- no name that the engine knows comes to mean another image; files get a name that says which content they had;
- a name is looked for in the engine, in the store, and by the engine in its registry;
- a name that none of them has is the task's fault, with what to do; what cannot be asked now is nobody's;
- how far it is is told as it is for images of the store; the key for a registry goes to the engine, nowhere else.
"""

import base64
import hashlib
import tarfile
import urllib.parse
from pathlib import Path
from typing import Any

import msgspec

from rookery.sandboxes.images import builders, credentials, exporting, locks, records, sources
from rookery.sandboxes.images.content import Store
from rookery.sandboxes.images.engine import MAX_ANSWER, SAVE_SECONDS, Engine
from rookery.sandboxes.images.progress import Bar, OnProgress
from rookery.sandboxes.images.references import HUB, Reference, shown
from rookery.sandboxes.images.sources import unavailable

OURS = "rookery/image"
"""The repository of images that came from files."""
WAIT_SECONDS = 3600.0
_DONE = ("Pull complete", "Already exists")
_MISSING = (
    "not found",
    "denied",
    "unauthorized",
    "manifest unknown",
    "no matching manifest",
    "no basic auth credentials",
    "HTTP 404",
)
"""What engines say of a name that its registry does not have, or not for this key."""


def give(
    reference: Reference, engine: Engine, store: Store | None = None, on_progress: OnProgress | None = None
) -> str:
    """The name by which the engine knows it from now on. Blocks: for a thread, or a program of its own."""
    named = reference.registry != ""
    if named and engine.image(shown(reference.name)):
        return shown(reference.name)
    key = reference.key
    if reference.kind == "dockerfile":
        key = f"dockerfile:{reference.path}:{builders.stamp(Path(reference.path))}"
    hashed = hashlib.sha256(f"engine {key}".encode()).hexdigest()[:32]
    name = shown(reference.name) if named else f"{OURS}:{hashed}"
    bar = Bar(shown(reference.name) if named else reference.text, on_progress)
    bar.step("waiting")
    kept = (store or Store()).open()
    with locks.wait(
        kept.lock_path("make", hashed), alone=True, seconds=WAIT_SECONDS, what=f"the image {reference.text}"
    ):
        if not engine.image(name):
            bar.step("finding")
            with kept.working() as (work, _):
                _given(reference, engine, name, work, kept, bar)
    bar.step("ready", last=True)
    return name


def _given(reference: Reference, engine: Engine, name: str, work: Path, store: Store, bar: Bar) -> None:
    path = Path(reference.path)
    saved = work / "saved.tar"
    match reference.kind:
        case "docker-archive":
            # Not as it is: it would give the engine's names to what it holds.
            _saved(sources.SavedSource(reference.path, reference.tag, reference.text).find(), name, saved)
            _loaded(engine, saved, bar)
        case "oci" | "oci-archive":
            source = sources.LayoutSource(reference.path, reference.tag, reference.text, sources.here())
            _saved(source.find(), name, saved)
            _loaded(engine, saved, bar)
        case "tar":
            bar.begin(path.stat().st_size, 1)
            engine.import_system(path, name, bar.have)
        case "folder":
            system = work / "system.tar"
            with tarfile.open(system, "w") as tar:
                tar.add(path, arcname=".")
            bar.begin(system.stat().st_size, 1)
            engine.import_system(system, name, bar.have)
        case "dockerfile":
            _tag(engine, builders.BuiltSource(path, reference.text, work).by_engine(engine), name)
        case _:
            if reference.kind == "name" and exporting.export(store, reference, name, saved):
                _loaded(engine, saved, bar)
                return
            if reference.kind == "engine":
                raise records.broken(
                    name, "the container engine has none of this name; pull, load or build it there"
                )
            _pull(reference, engine, bar)


def _loaded(engine: Engine, saved: Path, bar: Bar) -> None:
    bar.begin(saved.stat().st_size, 1)
    engine.load(saved, bar.have)


def _saved(found: sources.Found, name: str, target: Path) -> None:
    """An image of files, as `docker save` would have written it; engines take layers as they are compressed."""
    with tarfile.open(target, "w") as tar:
        layers = []
        for at, blob in enumerate(found.layers):
            assert blob.span is not None
            info = tarfile.TarInfo(f"{at}.tar")
            info.size = blob.span.length
            layers.append(info.name)
            with open(blob.span.path, "rb") as file:  # noqa: PTH123
                file.seek(blob.span.offset)
                tar.addfile(info, file)
        exporting.describe(tar, found.config, name, layers)


def _tag(engine: Engine, image: str, name: str) -> None:
    repository, _, tag = name.rpartition(":")
    query = urllib.parse.urlencode({"repo": repository, "tag": tag})
    with engine.ask("POST", f"/images/{urllib.parse.quote(image, safe='')}/tag?{query}") as reply:
        reply.read(MAX_ANSWER)
        if reply.status != 201:
            raise unavailable(f"the engine cannot name the image {image}", str(reply.status))


def _pull(reference: Reference, engine: Engine, bar: Bar) -> None:
    """By the engine itself, with the key that is stored for its registry."""
    name = shown(reference.name)
    where = f"{reference.registry}/{reference.repository}"
    query = urllib.parse.urlencode({"fromImage": where, "tag": reference.digest or reference.tag})
    headers = {}
    login = credentials.login_for(reference.registry)
    if login is not None:
        said = {
            "username": login.user,
            "password": login.secret,
            "identitytoken": login.identity,
            "serveraddress": credentials.HUB_KEY if reference.registry == HUB else reference.registry,
        }
        headers["X-Registry-Auth"] = base64.urlsafe_b64encode(msgspec.json.encode(said)).decode()
    error = ""
    layers: dict[str, tuple[int, int]] = {}
    with engine.ask("POST", f"/images/create?{query}", b"", headers=headers, seconds=SAVE_SECONDS) as reply:
        status = reply.status
        while line := reply.readline(MAX_ANSWER):
            one = _line(line)
            error = str(one.get("error") or (status != 200 and one.get("message")) or "") or error
            _follow(one, layers, bar)
    if not error and status == 200:
        return
    text = error[:500] or str(status)
    missing = status in (401, 403, 404) or any(word in text for word in _MISSING)
    if missing:
        advice = f"check the name, or log in with `docker login {reference.registry}`"
        raise records.broken(name, f"the engine cannot pull it: {text}; {advice}")
    raise unavailable(f"the engine cannot pull the image {name}", text)


def _line(line: bytes) -> dict[str, Any]:
    try:
        one = msgspec.json.decode(line)
    except msgspec.MsgspecError:
        return {}
    return one if isinstance(one, dict) else {}


def _follow(one: dict[str, Any], layers: dict[str, tuple[int, int]], bar: Bar) -> None:
    """What an engine says of one layer: how long it is is known when the first bytes come."""
    layer, status = str(one.get("id") or ""), str(one.get("status") or "")
    detail = one.get("progressDetail") or {}
    if status == "Pulling fs layer" or status == _DONE[1]:
        layers.setdefault(layer, (0, 0))
    if status == "Downloading" and isinstance(detail.get("total"), int):
        layers[layer] = (int(detail.get("current") or 0), max(0, detail["total"]))
    elif status in ("Download complete", *_DONE) and layer in layers:
        layers[layer] = (layers[layer][1], layers[layer][1])
    elif status != "Pulling fs layer":
        return
    bar.at(
        sum(done for done, _ in layers.values()), sum(total for _, total in layers.values()), layers=len(layers)
    )
    if status in _DONE:
        bar.layer()


def usual_engine() -> Engine | None:
    """Of this machine, where one answers."""
    from rookery.sandboxes.images.engine import find_socket

    found = find_socket()
    return Engine(found) if found else None
