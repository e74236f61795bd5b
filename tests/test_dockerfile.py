"""The image has what the package is built from, and its arguments are names that the package has."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINES = (ROOT / "Dockerfile").read_text().splitlines()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def copied():
    return {source for line in LINES if line.startswith("COPY ") for source in line.split()[1:-1]}


def test_every_file_that_the_wheel_needs_is_copied_and_not_ignored():
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {package.partition("/")[0] for package in wheel["packages"]} | set(wheel["force-include"])
    needed |= {"pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], "constraints.txt"}
    assert copied() == needed
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == needed


def test_its_extras_exist_and_its_documented_arguments_are_declared():
    declared = {line.split()[1].partition("=")[0] for line in LINES if line.startswith("ARG ")}
    texts = ["\n".join(LINES), (ROOT / "docs/how-to/docker.md").read_text()]
    for text in texts:
        assert set(re.findall(r"--build-arg (\w+)=", text)) == declared
        for extras in re.findall(r"EXTRAS=(\S+)", text):
            assert set(extras.split(",")) <= PROJECT["project"]["optional-dependencies"].keys()
