"""The installer's checks, and what the lock files promise."""

import json
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from workers.environments import install
from workers.environments.install import SIZES_GIB, Environment, SetupError, check_machine, find_python
from workers.environments.paths import EnvironmentMissing, environment_python


def pins(name: str) -> dict[str, str]:
    lines = (install.LOCKS / f"{name}.txt").read_text().splitlines()
    return dict(line.lower().split("==") for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("name", SIZES_GIB)
def test_every_package_is_pinned_to_a_version_any_index_has(name: str) -> None:
    for line in (install.LOCKS / f"{name}.txt").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line), line
    assert int(pins(name)["setuptools"].split(".")[0]) >= 78


def test_vllm_has_no_package_that_breaks_a_cpu_torch() -> None:
    assert not {"torchvision", "torchaudio", "torchcodec"} & pins("vllm").keys()
    assert pins("vllm")["torch"] == pins("onbelay")["torch"]


def test_an_environment_is_current_only_with_the_stamp_of_its_lock_file(tmp_path: Path) -> None:
    environment = Environment(tmp_path, "gym")
    environment.python.parent.mkdir(parents=True)
    environment.python.touch()
    assert not environment.is_current()
    stamp = environment.folder / "environment.json"
    stamp.write_text(json.dumps({"lock": "of an older release", "folder": str(environment.folder)}))
    assert not environment.is_current()
    stamp.write_text(json.dumps(environment._wanted()))
    assert environment.is_current()


def test_an_environment_that_is_a_link_is_never_replaced(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "gym").symlink_to(elsewhere)
    with pytest.raises(SetupError, match="is a link"):
        Environment(tmp_path, "gym").install("python3")


def test_a_missing_python_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "OLDEST_PYTHON", (99, 0))
    monkeypatch.setattr(install, "TESTED_PYTHON", (99, 0))
    with pytest.raises(SetupError, match=r"apt install python3\.11 python3\.11-venv"):
        find_python()


def test_a_missing_compiler_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(SetupError, match="apt install build-essential"):
        check_machine(tmp_path, [])


def test_a_full_disk_is_told_before_anything_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Usage(NamedTuple):
        total: int
        used: int
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10, 9, 1))
    with pytest.raises(SetupError, match=r"needs 2\.0 GiB of disk space"):
        check_machine(tmp_path, [Environment(tmp_path, "gym")])


def test_environments_made_elsewhere_are_used_as_they_are(tmp_path: Path) -> None:
    for name in ("onbelay", "vllm"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").touch()
    with pytest.raises(SetupError, match="has no environment gym"):
        install.check_given(tmp_path)


def test_a_missing_environment_says_how_to_make_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONBELAY_VENVS", str(tmp_path))
    with pytest.raises(EnvironmentMissing, match="make setup"):
        environment_python("vllm")
