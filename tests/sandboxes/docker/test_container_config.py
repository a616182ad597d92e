"""Requests that create containers, as plain data; no engine is needed."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from rookery.core import SandboxSpec
from rookery.core.sandboxes import Mount
from rookery.sandboxes.docker import client
from rookery.sandboxes.docker.container_config import (
    choose_user,
    choose_workdir,
    creation_request,
    find_engine_problems,
    find_spec_problems,
    guard_settings,
    may_support_quota,
)

INFO = {"OSType": "linux", "Driver": "overlay2", "DriverStatus": [["Backing Filesystem", "extfs"]]}
SPEC = SandboxSpec(provider="docker", image="app:1")
IMAGE: dict[str, Any] = {"Id": "sha256:1", "Config": {"User": "agent:staff", "WorkingDir": "/srv/app"}}


def build_request(spec: SandboxSpec, *, quota: bool = False, **image: Any) -> dict[str, Any]:
    return creation_request(
        spec,
        image={**IMAGE, **image},
        bundle_directory="/b",
        socket_directory="/s",
        token="t",
        labels={"rookery.run": "r"},
        quota=quota,
    )


@pytest.mark.parametrize(
    "engine_info",
    [
        {"Runtimes": {"runc": {}, "nvidia": {}}},
        {"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}]},
    ],
)
def test_gpus_require_an_engine_with_gpus(engine_info: dict[str, Any]) -> None:
    spec = replace(SPEC, gpus=2)
    (requested,) = build_request(spec)["HostConfig"]["DeviceRequests"]
    assert (requested["Count"], requested["Capabilities"]) == (2, [["gpu"]])
    assert find_engine_problems(spec, {**INFO, **engine_info}, ["bridge"]) == []
    assert "2 GPUs" in find_engine_problems(spec, {**INFO, "Runtimes": {"runc": {}}}, ["bridge"])[0]
    assert "Podman" in find_engine_problems(spec, {**INFO, **engine_info, "BuildahVersion": "1"}, ["bridge"])[0]
    assert "DeviceRequests" not in build_request(SPEC)["HostConfig"]
    assert "negative" in find_spec_problems(replace(SPEC, gpus=-1))[0]


@pytest.mark.parametrize(
    ("info", "has_quota"),
    [
        (INFO, False),
        ({**INFO, "DriverStatus": [["Backing Filesystem", "xfs"]]}, True),
        ({"Driver": "btrfs"}, True),
        ({"Driver": "overlay2", "DriverStatus": None}, False),
    ],
)
def test_disk_limit_uses_a_quota_or_file_size_limit(info: dict[str, Any], has_quota: bool) -> None:
    spec = replace(SPEC, disk=1 << 20)
    assert may_support_quota(info) is has_quota
    assert build_request(spec, quota=has_quota)["HostConfig"].get("StorageOpt") == (
        {"size": "1048576"} if has_quota else None
    )
    assert guard_settings(spec, IMAGE, limit_file_size=not has_quota)["max_file_size"] == (
        0 if has_quota else 1 << 20
    )


def test_unenforced_limits_are_reported() -> None:
    spec = replace(SPEC, memory=64 << 20, pids=8, cpus=1.0)
    info = {**INFO, "MemoryLimit": False, "PidsLimit": False, "CpuCfsQuota": False}
    assert len(find_engine_problems(spec, info, [])) == 3
    assert find_engine_problems(replace(SPEC, memory=None, pids=None), info, []) == []
    podman = {**INFO, "MemoryLimit": True, "PidsLimit": True, "CpuCfsQuota": True, "BuildahVersion": "1"}
    for rootless, version, count in ((True, "1", 3), (True, "2", 0), (False, "1", 0)):
        assert (
            len(find_engine_problems(spec, {**podman, "Rootless": rootless, "CgroupVersion": version}, []))
            == count
        )


@pytest.mark.parametrize(
    ("requested", "image_user", "expected_user"),
    [
        (None, "agent", 1000),
        ("user", "agent", 1000),
        ("root", "agent", 0),
        ("1234", "agent", 1234),
        ("image", "", 1000),
        ("image", "root", 0),
        ("image", "0:0", 0),
        ("image", "77:88", 77),
        ("image", "4000000000", 1000),
        ("image", "agent:staff", "agent"),
    ],
)
def test_user_comes_from_the_spec_or_the_image(
    requested: str | None, image_user: str, expected_user: int | str
) -> None:
    spec = replace(SPEC, user=requested)
    assert find_spec_problems(spec) == []
    assert choose_user(spec, {"Config": {"User": image_user}}) == expected_user
    settings = guard_settings(spec, {"Config": {"User": image_user}}, limit_file_size=False)
    assert (settings["uid"], settings["user"]) == (
        (1000, expected_user) if isinstance(expected_user, str) else (expected_user, "")
    )


def test_workdir_comes_from_the_spec_or_the_image() -> None:
    workdirs = [
        choose_workdir(replace(SPEC, workdir=requested), IMAGE) for requested in (None, "", "sub/x", "/srv")
    ]
    assert workdirs == ["/srv/app", "/work", "/work/sub/x", "/srv"]
    assert choose_workdir(SPEC, {"Config": None}) == "/work"


def test_request_disables_the_images_own_settings() -> None:
    spec = replace(SPEC, labels={"team": "blue"}, read_only=True, disk=1 << 20)
    config = {**IMAGE["Config"], "Env": ["LD_PRELOAD=/x.so", "A=b"], "Healthcheck": {"Test": ["CMD", "x"]}}
    request = build_request(spec, Config=config)
    host = request["HostConfig"]
    assert request["Labels"] == {"team": "blue", "rookery.run": "r"}
    assert (request["Cmd"], request["Healthcheck"], host["Init"]) == ([], {"Test": ["NONE"]}, False)
    assert "LD_PRELOAD" in request["Env"]  # a name without a value removes the variable
    assert (host["ReadonlyRootfs"], host["CapDrop"], host["NetworkMode"]) == (True, ["ALL"], "none")
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert sorted(host["Tmpfs"]) == ["/run", "/tmp", "/work"]
    assert all("size=1048576" in options for options in host["Tmpfs"].values())


def test_request_for_podman() -> None:
    mounts = (Mount(source="/here", target="/etc/hosts"), Mount(source="/there", target="/data"))
    image = {**IMAGE, "Config": {"Env": ["LD_PRELOAD=/x.so", "A=b", "PATH=/opt"]}}
    more: dict[str, Any] = {"bundle_directory": "/b", "socket_directory": "/s", "token": "t", "labels": {}}
    more["quota"] = False
    request = creation_request(replace(SPEC, mounts=mounts), image=image, podman=True, **more)
    assert request["Env"][:2] == ["LD_PRELOAD=", "A="]
    assert not [one for one in request["Env"] if "=" not in one]
    bound = {(one["Source"], one["Target"]) for one in request["HostConfig"]["Mounts"]}
    # A path is mounted once; a mount of the spec takes precedence.
    assert ("/here", "/etc/hosts") in bound
    assert ("/b/hosts", "/etc/hosts") not in bound
    assert ("/b/resolv.conf", "/etc/resolv.conf") in bound
    whole = (Mount(source="/here", target="/etc"),)
    for spec in (replace(SPEC, network="all"), replace(SPEC, mounts=whole)):
        request = creation_request(spec, image=image, podman=True, **more)
        assert not [one for one in request["HostConfig"]["Mounts"] if one["Target"].startswith("/etc/")]


@pytest.mark.parametrize(
    ("status", "reply", "expected"),
    [
        (500, {"cause": "no such container", "message": "container x: no such container", "response": 500}, 404),
        (500, {"cause": "no such image", "message": "x", "response": 500}, 404),
        (500, {"cause": "normalizing name: invalid reference format", "response": 500}, 400),
        (500, {"cause": "disk full", "message": "no such container", "response": 500}, 500),
        (500, {"message": "no such container"}, 500),
        (500, ["cause"], 500),
        (409, {"cause": "no such container"}, 409),
    ],
)
def test_podman_error_statuses_are_normalized(status: int, reply: object, expected: int) -> None:
    assert client.normalize_status(status, json.dumps(reply).encode()) == expected
    assert client.normalize_status(500, b"\xff no json") == 500
