"""Harmless programs, which must work: they show that the sandbox does not contain attacks by breaking everything."""

from __future__ import annotations

from dataclasses import replace

from agentenv.sandbox.types import ExecStatus, Policy
from tests.sandbox.escapes.cases import LIMITS, EscapeCase, case

_PROGRAMS: list[tuple[str, Policy, str, str]] = [
    (
        "files_work",
        "pure",
        "open('out','w').write('ok')\nprint(open('out').read(), open('data/in.txt').read())",
        "ok given",
    ),
    (
        "mapped_temporary_files_work",
        "pure",
        "import mmap, tempfile, time\nkept = []\nfor _ in range(8):\n    with tempfile.TemporaryFile() as file:\n        file.truncate(4096)\n        kept.append(mmap.mmap(file.fileno(), 4096))\ntime.sleep(0.2)\nprint(len(kept))",
        "8",
    ),
    ("zeros_work", "proc", "print(open('/dev/zero', 'rb').read(4) == bytes(4))", "True"),
    (
        "threads_work",
        "pure",
        "import threading\nt=[threading.Thread(target=print, args=('in a thread',)) for _ in range(3)]\n[x.start() for x in t]\n[x.join() for x in t]",
        "in a thread",
    ),
    (
        "stdlib_works",
        "pure",
        "import re, math, decimal, fractions, heapq, bisect, itertools, collections, functools, statistics, datetime, string, random, json, csv, io, copy, typing, dataclasses, enum, abc, contextlib, hashlib, base64, struct, zlib, bz2, lzma, sqlite3, unicodedata, tempfile, pathlib, shutil, textwrap, operator, array, queue, time, calendar, unittest, doctest, ast, inspect, pprint, difflib, secrets, uuid, zoneinfo, xml.etree.ElementTree, html, urllib.parse, email, pickle, select\nprint('imported', hashlib.sha256(b'').hexdigest()[:6], sqlite3.connect(':memory:').execute('select 2').fetchone())",
        "imported e3b0c4 (2,)",
    ),
    (
        "subprocess_works",
        "proc",
        "import subprocess\nprint(subprocess.run([sys.executable, '-c', 'print(6*7)'], capture_output=True, text=True))",
        "42",
    ),
]
"""Name, policy, program and expected output of harmless programs, which must work."""

CONTROLS: list[EscapeCase] = [
    case(
        name,
        f"say('TRYING')\nsay('HELD')\n{program}",
        policy,
        check=lambda result, facts, text=text: (
            ""
            if text in result.stdout and result.status is ExecStatus.OK
            else f"{result.status}: {result.stdout[-200:]!r} {result.stderr[-300:]}"
        ),
        limits=replace(LIMITS, cpu_s=10.0),
        stdin=b"1 2\n",
        files={"data/in.txt": b"given"},
    )
    for name, policy, program, text in _PROGRAMS
]
