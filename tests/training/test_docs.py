"""Examples of docs/guides/training.md run, and imports stay light."""

import re
from pathlib import Path

import pytest

from rookery.training import BatchConfig
from tests.core.test_imports import modules_loaded_by
from tests.docs.test_docs import ROOT, blocks

PAGE = ROOT / "docs" / "guides" / "training.md"
TUTORIAL = ROOT / "docs" / "tutorials" / "train-the-embedded-policy.md"


@pytest.mark.long
def test_documented_custom_trainer_agrees_with_the_sampler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = [block for block in blocks(TUTORIAL, "python") if "own_trainer.py" in block]
    assert len([line for line in example.splitlines() if line.strip()]) <= 30
    monkeypatch.chdir(tmp_path)
    exec(compile(example, str(TUTORIAL), "exec"), {"__name__": "own_trainer"})
    output = capsys.readouterr().out
    steps = re.findall(r"^step (\d): .* off by (\S+)$", output, re.MULTILINE)
    assert {step for step, _ in steps} == {"1", "2"}
    assert all(float(off) < 1e-4 for step, off in steps if step == "1"), output


def test_every_setting_of_a_batch_is_documented() -> None:
    page = PAGE.read_text()
    for name in BatchConfig.__struct_fields__:
        assert re.search(rf"`{name}\b", page), name


def test_nothing_heavier_than_numpy_is_imported() -> None:
    heavy = {"torch", "transformers", "trl", "aiohttp", "asyncio", "rich", "click", "sqlite3", "rookery.engine"}
    assert modules_loaded_by("import rookery.training") & heavy == set()
