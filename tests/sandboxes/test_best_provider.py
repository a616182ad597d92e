"""The best provider of a machine: one that isolates and works here, found by entry point like any other."""

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
    """A path of plug-ins. Besides them only `subprocess` is there, whatever else this version brings along."""
    for name in [name for name in sys.modules if name.startswith("plugin_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    installed = sandboxes._entry_points

    def few() -> dict[str, EntryPoint]:
        ours = [name for name, entry in installed().items() if entry.value.startswith("rookery.")]
        return {name: entry for name, entry in installed().items() if name == "subprocess" or name not in ours}

    monkeypatch.setattr(sandboxes, "_entry_points", few)
    return tmp_path


def test_without_another_it_is_subprocess_which_does_not_isolate() -> None:
    best = best_provider()
    assert (best.name, best.isolated, best.refused) == ("subprocess", False, {})


def test_one_that_isolates_and_works_here_wins(plugins: Path) -> None:
    plugin(plugins, "walled", check=WORKS)
    best = best_provider()
    assert (best.name, best.isolated) == ("walled", True)
    assert is_isolated("walled")


def test_one_that_refuses_the_spec_is_passed_over_with_its_reasons(plugins: Path) -> None:
    plugin(plugins, "walled", check=REFUSES)
    best = best_provider()
    assert (best.name, best.isolated) == ("subprocess", False)
    assert best.refused == {"walled": "This kernel has no cgroups. Ask for some."}
    plugin(plugins, "yard", check=WORKS)
    assert best_provider().name == "yard"


def test_the_check_sees_the_spec_with_the_providers_own_name(plugins: Path) -> None:
    plugin(plugins, "walled", check="return [] if (spec.provider, spec.image) == ('walled', 'debian') else ['no']")
    assert best_provider(SandboxSpec(image="debian")).name == "walled"
    assert best_provider().name == "subprocess"


def test_one_that_does_not_isolate_is_no_better_than_subprocess(plugins: Path) -> None:
    plugin(plugins, "another", check=WORKS, isolated=False)
    assert best_provider().name == "subprocess"
    assert best_provider().refused == {}


def test_one_that_cannot_even_be_asked_is_passed_over(plugins: Path) -> None:
    plugin(plugins, "broken", check=BREAKS)
    plugin(plugins, "missing", check=WORKS, module="a_module_that_is_not_there")
    best = best_provider()
    assert best.name == "subprocess"
    assert best.refused["broken"] == "OSError: no socket"
    assert "ModuleNotFoundError" in best.refused["missing"]


def test_of_several_the_quickest_to_start_wins_then_the_first_by_name(plugins: Path) -> None:
    plugin(plugins, "zoo", check=WORKS)
    plugin(plugins, "docker_like", check=WORKS)
    assert best_provider().name == "docker_like"
    plugin(plugins, "local", check=WORKS)
    assert best_provider().name == "local"


# ---- settling for one


def test_a_spec_that_names_no_provider_gets_the_best(plugins: Path) -> None:
    plugin(plugins, "walled", check=WORKS)
    assert resolve_spec(SandboxSpec(pids=9)) == (SandboxSpec(provider="walled", pids=9), "")


def test_naming_one_that_does_not_isolate_is_consent() -> None:
    spec = SandboxSpec(provider="subprocess")
    assert resolve_spec(spec) == (spec, "")


def test_where_nothing_isolates_nothing_is_chosen_in_silence(plugins: Path) -> None:
    plugin(plugins, "walled", check=REFUSES)
    spec, why = resolve_spec(SandboxSpec())
    assert spec.provider == ""
    for words in ("walled: This kernel has no cgroups.", "rookery doctor", "--unsafe", "untrusted_ok=True"):
        assert words in why


def test_with_consent_it_is_the_last_resort(plugins: Path) -> None:
    assert resolve_spec(SandboxSpec(untrusted_ok=True)) == (
        SandboxSpec(provider="subprocess", untrusted_ok=True),
        "",
    )
    plugin(plugins, "walled", check=WORKS)
    assert resolve_spec(SandboxSpec(untrusted_ok=True))[0].provider == "walled"


# ---- what a run says, over what its environment says


def test_what_is_said_goes_over_and_the_rest_stays() -> None:
    own = SandboxSpec(image="theirs", memory=1, network="all")
    assert SandboxSpec().over(None) == SandboxSpec()
    assert SandboxSpec().over(own) == own
    assert SandboxSpec(image="mine", pids=3).over(own) == SandboxSpec(
        image="mine", memory=1, network="all", pids=3
    )


def test_a_default_that_was_said_goes_over_too() -> None:
    own = SandboxSpec(image="theirs", network="all")
    assert SandboxSpec(network="none").over(own).network == "all"
    assert SandboxSpec(network="none").over(own, ("network",)) == SandboxSpec(image="theirs")


def test_an_image_of_a_run_means_the_same_from_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "image").mkdir()
    monkeypatch.chdir(tmp_path)
    for provider in ("", "local"):
        assert resolve_spec(SandboxSpec(provider=provider, image="image", untrusted_ok=True))[0].image == str(
            tmp_path / "image"
        )
    assert resolve_spec(SandboxSpec(provider="local", image="a-name:1"))[0].image == "a-name:1"
