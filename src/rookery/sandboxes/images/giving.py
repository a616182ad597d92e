"""Gives a container engine an image that it does not have: for sandboxes that the engine makes.

Promises:
- it is done once, however many processes ask for the same image: the others wait;
- an image that the engine has under its name is left as it is; files get a name that says which content they had;
- a name that neither the engine nor its registry has is the task's fault, with what to do.
"""

import base64
import hashlib
import io
import tarfile
import urllib.parse
from pathlib import Path

import msgspec

from rookery.sandboxes.images import builders, credentials, locks, records, sources
from rookery.sandboxes.images.content import Store
from rookery.sandboxes.images.engine import MAX_ANSWER, SAVE_SECONDS, Engine
from rookery.sandboxes.images.references import HUB, Reference, shown
from rookery.sandboxes.images.sources import unavailable

OURS = "rookery/image"
"""The repository of images that came from files."""
WAIT_SECONDS = 3600.0


def give(reference: Reference, engine: Engine, store: Store | None = None) -> str:
    """The name by which the engine knows it from now on. Blocks: for a thread."""
    named = reference.registry != ""
    if named and engine.image(shown(reference.name)):
        return shown(reference.name)
    key = reference.key
    if reference.kind == "dockerfile":
        key = f"dockerfile:{reference.path}:{builders.stamp(Path(reference.path))}"
    hashed = hashlib.sha256(f"engine {key}".encode()).hexdigest()[:32]
    name = shown(reference.name) if named else f"{OURS}:{hashed}"
    kept = (store or Store()).open()
    with locks.wait(
        kept.lock_path("make", hashed), alone=True, seconds=WAIT_SECONDS, what=f"the image {reference.text}"
    ):
        if engine.image(name):
            return name
        with kept.working() as (work, _):
            _given(reference, engine, name, work)
    return name


def _given(reference: Reference, engine: Engine, name: str, work: Path) -> None:
    path = Path(reference.path)
    match reference.kind:
        case "docker-archive":
            found = engine.load(path)
            wanted = [one for one in found if not reference.tag or reference.tag in (one, one.rpartition(":")[2])]
            if not wanted:
                raise records.broken(reference.text, f"it has no image {reference.tag!r}")
            _tag(engine, wanted[0], name)
        case "oci" | "oci-archive":
            source = sources.LayoutSource(reference.path, reference.tag, reference.text, sources.here())
            _saved(source.find(), name, work / "saved.tar")
            engine.load(work / "saved.tar")
        case "tar":
            engine.import_system(path, name)
        case "folder":
            with tarfile.open(work / "system.tar", "w") as tar:
                tar.add(path, arcname=".")
            engine.import_system(work / "system.tar", name)
        case "dockerfile":
            builders.BuiltSource(path, reference.text, work).find()
            engine.load(work / "built.tar")
            _tag(engine, _only_image(work / "built.tar", reference.text), name)
        case _:
            if reference.kind == "engine":
                raise records.broken(
                    name, "the container engine has none of this name; pull, load or build it there"
                )
            _pull(reference, engine)


def _only_image(archive: Path, text: str) -> str:
    found = sources.SavedSource(str(archive), "", text).find()
    return records.digest_of(found.config)


def _saved(found: sources.Found, name: str, target: Path) -> None:
    """A layout, as `docker save` would have written it; engines take layers as they are compressed."""
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
        config = f"{records.digest_of(found.config)[7:]}.json"
        manifest = msgspec.json.encode([{"Config": config, "RepoTags": [name], "Layers": layers}])
        for file_name, data in ((config, found.config), ("manifest.json", manifest)):
            info = tarfile.TarInfo(file_name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def _tag(engine: Engine, image: str, name: str) -> None:
    repository, _, tag = name.rpartition(":")
    query = urllib.parse.urlencode({"repo": repository, "tag": tag})
    with engine.ask("POST", f"/images/{urllib.parse.quote(image, safe='')}/tag?{query}") as reply:
        reply.read(MAX_ANSWER)
        if reply.status != 201:
            raise unavailable(f"the engine cannot name the image {image}", str(reply.status))


def _pull(reference: Reference, engine: Engine) -> None:
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
    with engine.ask("POST", f"/images/create?{query}", b"", headers=headers, seconds=SAVE_SECONDS) as reply:
        data = reply.read(MAX_ANSWER)
        status = reply.status
    said_last = ""
    for line in data.splitlines():
        try:
            one = msgspec.json.decode(line)
        except msgspec.MsgspecError:
            continue
        said_last = str(one.get("error") or one.get("message") or "") if isinstance(one, dict) else ""
        if said_last and (status != 200 or one.get("error")):
            break
    else:
        if status == 200:
            return
    text = said_last[:500] or str(status)
    missing = status in (401, 403, 404) or any(
        word in text
        for word in ("not found", "denied", "unauthorized", "manifest unknown", "no matching manifest")
    )
    if missing:
        advice = f"check the name, or log in with `docker login {reference.registry}`"
        raise records.broken(name, f"the engine cannot pull it: {text}; {advice}")
    raise unavailable(f"the engine cannot pull the image {name}", text)


def usual_engine() -> Engine | None:
    """Of this machine, where one answers."""
    from rookery.sandboxes.images.engine import find_socket

    found = find_socket()
    return Engine(found) if found else None
