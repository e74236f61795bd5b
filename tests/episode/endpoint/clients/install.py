"""Install clients as they come from PyPI and npm: `python install.py FOLDER NAME…`, or all, if none is named.

Each gets an environment in FOLDER, unless it has it already.
"""

import subprocess
import sys
import tomllib
import venv
from pathlib import Path

HERE = Path(__file__).parent
CLIENTS = tomllib.loads((HERE / "clients.toml").read_text())


def program_of(name):
    return HERE / CLIENTS[name]["program"]


def environment_of(name):
    return CLIENTS[name].get("environment", name)


def packages_of(environment):
    """Return the packages of all clients with an environment."""
    sharing = [client for name, client in CLIENTS.items() if environment_of(name) == environment]
    return [package for client in sharing for package in client.get("packages", ())]


def is_installed(folder, name):
    environment = environment_of(name)
    mark = folder / environment / "installed"
    return mark.exists() and mark.read_text().split() == packages_of(environment)


def install(folder, name):
    where, packages = folder / environment_of(name), packages_of(environment_of(name))
    print(f"{where}: {' '.join(packages)}", flush=True)
    if program_of(name).suffix == ".mjs":
        command = ["npm", "install", "--silent", "--prefix", where, *packages]
    else:
        venv.create(where, clear=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", where / "bin/python"]
        command = [*pip, "install", "-q", *packages]
    subprocess.run(command, check=True)
    (where / "installed").write_text("\n".join(packages))


if __name__ == "__main__":
    target, names = Path(sys.argv[1]).absolute(), sys.argv[2:] or list(CLIENTS)
    for client in names:
        if not is_installed(target, client):
            install(target, client)
