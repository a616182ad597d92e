"""Choice of the best provider: one that isolates and works on this machine."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from rookery import sandboxes
from rookery.core import SandboxSpec
from rookery.sandboxes import best_provider, is_isolated, resolve_spec
from tests.sandboxes.plugins import plugin

WORKS = "return []"
REFUSES = "return ['This kernel has no cgroups.', 'Ask for some.']"
BREAKS = "raise OSError('no socket')"


@pytest.fixture(autouse=True)
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory for plug-ins. Of the built-in providers, only `subprocess` is visible."""
    for name in [name for name in sys.modules if name.startswith("plugin_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    installed = sandboxes._entry_points

    def list_selected() -> dict[str, EntryPoint]:
        ours = [name for name, entry in installed().items() if entry.value.startswith("rookery.")]
        return {name: entry for name, entry in installed().items() if name == "subprocess" or name not in ours}

    monkeypatch.setattr(sandboxes, "_entry_points", list_selected)
    return tmp_path


def test_fallback_is_subprocess() -> None:
    best = best_provider()
    assert (best.name, best.isolated, best.refused) == ("subprocess", False, {})


def test_isolating_provider_is_preferred(plugins: Path) -> None:
    plugin(plugins, "isolating", check=WORKS)
    best = best_provider()
    assert (best.name, best.isolated) == ("isolating", True)
    assert is_isolated("isolating")


def test_refusing_provider_is_skipped_with_its_reasons(plugins: Path) -> None:
    plugin(plugins, "isolating", check=REFUSES)
    best = best_provider()
    assert (best.name, best.isolated) == ("subprocess", False)
    assert best.refused == {"isolating": "This kernel has no cgroups. Ask for some."}
    plugin(plugins, "other", check=WORKS)
    assert best_provider().name == "other"


def test_check_gets_the_spec_with_the_providers_name(plugins: Path) -> None:
    plugin(
        plugins,
        "isolating",
        check="return [] if (spec.provider, spec.image) == ('isolating', 'debian') else ['no']",
    )
    assert best_provider(SandboxSpec(image="debian")).name == "isolating"
    assert best_provider().name == "subprocess"


def test_non_isolating_provider_is_not_preferred(plugins: Path) -> None:
    plugin(plugins, "another", check=WORKS, isolated=False)
    assert best_provider().name == "subprocess"
    assert best_provider().refused == {}


def test_broken_provider_is_skipped(plugins: Path) -> None:
    plugin(plugins, "broken", check=BREAKS)
    plugin(plugins, "missing", check=WORKS, module="a_module_that_is_not_there")
    best = best_provider()
    assert best.name == "subprocess"
    assert best.refused["broken"] == "OSError: no socket"
    assert "ModuleNotFoundError" in best.refused["missing"]


def test_local_is_preferred_then_the_first_by_name(plugins: Path) -> None:
    plugin(plugins, "zebra", check=WORKS)
    plugin(plugins, "docker_like", check=WORKS)
    assert best_provider().name == "docker_like"
    plugin(plugins, "local", check=WORKS)
    assert best_provider().name == "local"


# ---- resolving a spec


def test_spec_without_provider_gets_the_best(plugins: Path) -> None:
    plugin(plugins, "isolating", check=WORKS)
    assert resolve_spec(SandboxSpec(pids=9)) == (SandboxSpec(provider="isolating", pids=9), "")


def test_naming_a_non_isolating_provider_is_consent() -> None:
    spec = SandboxSpec(provider="subprocess")
    assert resolve_spec(spec) == (spec, "")


def test_without_isolation_nothing_is_chosen_silently(plugins: Path) -> None:
    plugin(plugins, "isolating", check=REFUSES)
    spec, why = resolve_spec(SandboxSpec())
    assert spec.provider == ""
    for named in ("isolating: This kernel has no cgroups.", "rookery doctor", "--unsafe", "untrusted_ok=True"):
        assert named in why


def test_subprocess_is_used_with_consent(plugins: Path) -> None:
    assert resolve_spec(SandboxSpec(untrusted_ok=True)) == (
        SandboxSpec(provider="subprocess", untrusted_ok=True),
        "",
    )
    plugin(plugins, "isolating", check=WORKS)
    assert resolve_spec(SandboxSpec(untrusted_ok=True))[0].provider == "isolating"


# ---- merging the specs of a run and of its environment


def test_set_fields_override_the_environments_spec() -> None:
    own = SandboxSpec(image="theirs", memory=1, network="all")
    assert SandboxSpec().over(None) == SandboxSpec()
    assert SandboxSpec().over(own) == own
    assert SandboxSpec(image="mine", pids=3).over(own) == SandboxSpec(
        image="mine", memory=1, network="all", pids=3
    )


def test_explicit_defaults_override_too() -> None:
    own = SandboxSpec(image="theirs", network="all")
    assert SandboxSpec(network="none").over(own).network == "all"
    assert SandboxSpec(network="none").over(own, ("network",)) == SandboxSpec(image="theirs")


def test_image_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "image").mkdir()
    monkeypatch.chdir(tmp_path)
    for provider in ("", "local"):
        assert resolve_spec(SandboxSpec(provider=provider, image="image", untrusted_ok=True))[0].image == str(
            tmp_path / "image"
        )
    assert resolve_spec(SandboxSpec(provider="local", image="a-name:1"))[0].image == "a-name:1"
