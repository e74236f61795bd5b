"""What several files of faults need."""

import subprocess
import sys

import pytest

from tests.faults import policy_server


@pytest.fixture(scope="module")
def ports():
    """The port of the server, and one on which nothing listens."""
    command = [sys.executable, policy_server.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield [int(port) for port in process.stdout.readline().split()]
        process.stdin.close()
