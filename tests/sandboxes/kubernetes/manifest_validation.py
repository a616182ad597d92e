"""Validate manifests against the official schemas, as the stand-in for an API server does."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

VERSION = "1.32"
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
KINDS = {
    "pods": ("v1", "Pod"),
    "networkpolicies": ("networking.k8s.io/v1", "NetworkPolicy"),
    "sandboxclaims": ("extensions.agents.x-k8s.io/v1beta1", "SandboxClaim"),
    "sandboxes": ("agents.x-k8s.io/v1beta1", "Sandbox"),
}


class Refused(Exception):
    """An error answer of the API server, as a `Status` object."""

    def __init__(self, code: int, reason: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.headers = code, reason, headers

    def status(self) -> dict[str, Any]:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "code": self.code,
        }


@functools.cache
def _validator(kind: str, api_version: str) -> Any:
    short = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    newest = kubernetes_validate.latest_version()
    version = next(
        v for v in kubernetes_validate.utils.all_versions() if v.startswith(f"{VERSION}.") or v == newest
    )
    folder = f"kubernetes-json-schema/v{version}-local-strict"
    schema = schema_contents(f"{folder}/{kind.lower()}-{short}.json", VERSION)
    definitions = schema_contents(f"{folder}/_definitions.json", VERSION)
    registry: Any = Registry()
    for content in (schema, definitions):
        registry = Resource.from_contents(content) @ registry
    return jsonschema.validators.Draft202012Validator(schema, registry=registry)


@functools.cache
def _claim_schema() -> dict[str, Any]:
    """Return the schema of claims from the project's own definition, in which unknown fields are an error."""
    (version,) = yaml.safe_load(Path(__file__).with_name("sandboxclaims.yaml").read_text())["spec"]["versions"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    _refuse_unknown_fields(schema["properties"]["spec"])
    return schema


def _refuse_unknown_fields(schema: dict[str, Any]) -> None:
    if "properties" in schema:
        schema["additionalProperties"] = False
    for part in (*schema.get("properties", {}).values(), schema.get("items")):
        if isinstance(part, dict):
            _refuse_unknown_fields(part)


def validate(body: Mapping[str, Any], resource: str) -> None:
    """Raise `Refused` unless a manifest is valid for the official schema, without unknown fields."""
    api_version, kind = KINDS[resource]
    if (body.get("apiVersion"), body.get("kind")) != (api_version, kind):
        raise Refused(400, "BadRequest", f"expected {kind} of {api_version}")
    try:
        if resource == "sandboxclaims":
            jsonschema.validate(body, _claim_schema(), format_checker=jsonschema.FormatChecker())
        else:
            _validator(kind, api_version).validate(dict(body))
    except jsonschema.ValidationError as error:
        raise Refused(422, "Invalid", f"{kind} is invalid: {error.json_path}: {error.message}") from error
    if not _NAME.fullmatch(body["metadata"]["name"]):
        raise Refused(422, "Invalid", f"the name {body['metadata']['name']!r} is invalid")
    for name, value in (body["metadata"].get("labels") or {}).items():
        if not _LABEL.fullmatch(value):
            raise Refused(422, "Invalid", f"the label {name} is invalid: {value!r}")
