"""NeMo-Gym's wheel has top-level packages with common names; ours, which come first on its path, must not hide them."""

import json
import subprocess

import pytest

from workers.environments.paths import child_environment, environment_python

pytestmark = pytest.mark.integration

FIND = """
import importlib.util, json, pathlib, sysconfig
installed = pathlib.Path(sysconfig.get_paths()["purelib"])
hidden = []
for package in ("benchmarks", "environments", "resources_servers", "responses_api_agents", "responses_api_models"):
    names = [path.name for path in (installed / package).iterdir() if path.is_dir() and path.name.isidentifier()]
    assert names, package
    for name in names:
        found = importlib.util.find_spec(f"{package}.{name}")
        if found is None or installed not in pathlib.Path(next(iter(found.submodule_search_locations))).parents:
            hidden.append(f"{package}.{name}")
print(json.dumps(hidden))
"""


def test_every_package_of_nemo_gym_is_its_own() -> None:
    output = subprocess.run(
        [environment_python("gym"), "-c", FIND], env=child_environment(), capture_output=True, text=True, check=True
    )
    assert json.loads(output.stdout) == []
