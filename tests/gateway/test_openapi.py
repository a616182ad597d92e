"""The gateway's responses match its OpenAPI description for generated requests."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from rookery.gateway import openapi
from rookery.gateway.dialects import load_dialects
from rookery.gateway.openapi import build_openapi
from tests.gateway.kit import ADMIN_KEY, InProcessGateway, run_shard_in_thread
from tests.gateway.scripted_upstream import ScriptedUpstream

load_all_checks()
CALLS = [path for one in load_dialects().values() for path in (*one.paths, *getattr(one, "count_paths", ()))]
EXAMPLES = 25
"""Examples per operation and generation mode."""
BOUNDED = settings(
    deadline=None,
    max_examples=EXAMPLES,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    database=None,
    derandomize=True,  # with few examples, use the same ones in every run
)
FEW = settings(BOUNDED, max_examples=5)
SCHEMA = schemathesis.openapi.from_dict(build_openapi())
OPERATIONS = [result.ok() for result in SCHEMA.get_all_operations()]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessGateway]:
    with run_shard_in_thread(tmp_path_factory.mktemp("gateway"), ScriptedUpstream) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def secret(gateway: InProcessGateway) -> str:
    answer = requests.post(f"{gateway.url}/rollouts", json={"id": "one"}, headers=bearer(ADMIN_KEY), timeout=60)
    return str(answer.json()["secret"])


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def checks(*names: str) -> list[Any]:
    return [CHECKS.get_one(name) for name in names]


CONFORMS = checks(
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)


WAYS = [
    (operation, mode)
    for operation in OPERATIONS
    for mode in GenerationMode
    if mode is GenerationMode.POSITIVE
    or operation.definition.raw["security"]  # other operations have no invalid input
]


def long_marks(operation: Any) -> tuple[pytest.MarkDecorator, ...]:
    """Mark operations as long tests, except one path per dialect other than chat."""
    other_dialect = "/v1/rollouts" in operation.path and not operation.path.endswith(
        ("/chat/completions", "/models")
    )
    twice = "{id}/v1/" in operation.path or "tokens" in operation.path or "{response}" in operation.path
    return (pytest.mark.long,) if other_dialect and twice else ()


@pytest.mark.long
@pytest.mark.parametrize(
    ("operation", "mode"),
    [
        pytest.param(operation, mode, id=f"{operation.label} {mode.name.lower()}", marks=long_marks(operation))
        for operation, mode in WAYS
    ],
)
def test_every_response_matches_the_openapi_description(
    gateway: InProcessGateway, secret: str, operation: Any, mode: GenerationMode
) -> None:
    statuses: set[int] = set()
    other_dialect = any(operation.path.endswith(path) for path in CALLS) and "chat" not in operation.path

    @(FEW if other_dialect else BOUNDED)
    @given(operation.as_strategy(generation_mode=mode), st.sampled_from(["one", None]))
    def check(case: Case, session: str | None) -> None:
        keys = bearer(secret if "/v1/rollouts" in operation.path else ADMIN_KEY)
        if session is not None and "{id}" in operation.path and "DELETE" not in operation.label.upper():
            if "cancel" in operation.path:
                return
            case.path_parameters = {**case.path_parameters, "id": session}
        answer = case.call_and_validate(base_url=gateway.url, headers=keys, checks=CONFORMS, timeout=60)
        statuses.add(answer.status_code)

    check()
    right = mode is GenerationMode.POSITIVE and operation.label != "POST /rollouts/{id}/cancel"
    if right and operation.label != "DELETE /rollouts/{id}" and "{response}" not in operation.path:
        assert statuses & {200, 201}, f"no generated request was valid: {statuses}"


@pytest.mark.long
@pytest.mark.parametrize(
    "operation", [pytest.param(one, id=one.label, marks=long_marks(one)) for one in OPERATIONS]
)
def test_request_without_a_valid_key_gets_401(gateway: InProcessGateway, secret: str, operation: Any) -> None:
    needs = operation.definition.raw.get("security")
    other_dialect = any(operation.path.endswith(path) for path in CALLS) and "chat" not in operation.path

    @(FEW if other_dialect else BOUNDED)
    @given(operation.as_strategy(), st.sampled_from([{}, bearer("wrong"), bearer("other")]))
    def check(case: Case, headers: dict[str, str]) -> None:
        if "{id}" in operation.path:
            case.path_parameters = {**case.path_parameters, "id": "one"}
        if headers == bearer("other"):
            headers = bearer(ADMIN_KEY if "/v1/rollouts" in operation.path else secret)
        answer = case.call(base_url=gateway.url, headers=headers, timeout=60)
        assert (answer.status_code == 401) == bool(needs)

    check()


def test_description_is_served_and_lists_every_operation(gateway: InProcessGateway, tmp_path: Path) -> None:
    description = requests.get(f"{gateway.url}/openapi.json", timeout=60).json()
    assert description == msgspec.json.decode(msgspec.json.encode(build_openapi()))
    below = [f"/v1/rollouts/{{id}}{inner}" for inner in ("", "/v1")]
    assert {operation.label for operation in OPERATIONS} == {
        *("GET /", "HEAD /", "GET /healthz", "GET /metrics", "GET /v1/models"),
        *("GET /state", "POST /pause", "POST /resume"),
        *("GET /rollouts", "POST /rollouts", "GET /rollouts/{id}", "DELETE /rollouts/{id}"),
        *("GET /rollouts/{id}/trajectory", "POST /rollouts/{id}/cancel"),
        *(f"POST {base}{path}" for base in below for path in CALLS),
        *(f"{method} {base}/responses/{{response}}" for base in below for method in ("GET", "DELETE")),
        *(f"GET {base}/models" for base in below),
    }


@pytest.mark.parametrize("path", sorted(build_openapi()["paths"]))
def test_undescribed_method_gets_405_with_the_allowed_methods(
    gateway: InProcessGateway, secret: str, path: str
) -> None:
    right = {method.upper() for method in build_openapi()["paths"][path]} - {"PARAMETERS"}
    key = secret if path.startswith("/v1/rollouts") else ADMIN_KEY
    url = gateway.url + path.replace("{id}", "one").replace("{response}", "resp_1")
    for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"} - right:
        answer = requests.request(method, url, headers=bearer(key), timeout=60)
        assert answer.status_code == 405, (method, path)
        assert right <= set(answer.headers["allow"].split(", "))
        error = answer.json()["error"]
        assert error.get("code", "method_not_allowed") == "method_not_allowed"
        assert error["message"]


def test_dialect_without_a_description_gets_generic_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = SimpleNamespace(name="bare", paths=("/bare",), count_paths=("/bare/count",))
    monkeypatch.setattr(openapi, "load_dialects", lambda: {"bare": bare})
    paths = build_openapi()["paths"]
    call, count = (paths[f"/v1/rollouts/{{id}}{path}"]["post"] for path in ("/bare", "/bare/count"))
    for described in (call, count):
        assert described["requestBody"]["content"]["application/json"]["schema"] == {"type": "object"}
    assert "text/event-stream" in call["responses"]["200"]["content"]
    assert "text/event-stream" not in count["responses"]["200"]["content"]
