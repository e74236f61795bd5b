"""Attacks on the sandbox itself: its reports, folders and names, state that outlives a run, and other programs."""

from __future__ import annotations

from typing import Any

from agentenv.sandbox.types import ExecResult, ExecStatus, Isolation
from tests.sandbox.escapes.cases import LIMITS, SHORT, EscapeCase, case

ENDED = (ExecStatus.SIGNAL, ExecStatus.MEMORY, ExecStatus.DISK_LIMIT, ExecStatus.NONZERO)
TIMED = (ExecStatus.CPU_TIMEOUT, ExecStatus.WALL_TIMEOUT)


def _no_host_file(result: ExecResult, facts: dict[str, Any]) -> str:
    """Check that no fetched file has content of the host."""
    with open("/etc/passwd", "rb") as file:
        passwd = file.read()
    return next((f"{name} holds the host's file" for name, data in result.files.items() if data and data in passwd), "")


def _small(result: ExecResult, facts: dict[str, Any]) -> str:
    total = sum(map(len, result.files.values()))
    return "" if total <= LIMITS.fetch_mb << 20 else f"{total} bytes were fetched"


ARTIFACTS: list[EscapeCase] = [
    case(
        "artifact_symlink",
        """
say('TRYING')
for name, target in (('a', '/etc/passwd'), ('b', W['canary']), ('c', '/proc/self/environ'), ('f', 'd/passwd'), ('g', '../' * 30 + W['canary'])):
    os.symlink(target, name)
os.symlink('/etc', 'd')
os.symlink(os.path.dirname(W['canary']), 'e')
say('HELD', 'if the host fetches none of it')
""",
        fetch=("a", "b", "c", "d/passwd", "e/canary", "f", "g"),
        check=_no_host_file,
    ),
    case(
        "artifact_fifo",
        "say('TRYING')\nos.mkfifo('pipe')\nos.mkdir('folder')\nsay('HELD')",
        fetch=("pipe", "folder", "missing", "folder/x"),
        check=lambda result, facts: "" if not result.files else f"fetched {sorted(result.files)}",
        bare="held",
    ),
    case(
        "artifact_sparse",
        """
say('TRYING')
for name, size in (('tera', 1 << 40), ('giga', 7 << 20), ('mega', 1 << 20)):
    try:
        with open(name, 'wb') as file:
            file.truncate(size)
    except OSError:
        pass
say('HELD')
""",
        fetch=("tera", "giga", "mega"),
        ends=ENDED,
        check=_small,
        bare="held",
    ),
    case(
        "artifact_names",
        """
say('TRYING')
for name in (b'new\\nline', b'\\xff\\xfe', b'-rf', b'--help', b'..x', b' ', b'x' * 255, '\u202etxt'.encode(), b'a\\\\b', b'*'):
    open(name, 'wb').write(b'mine')
say('HELD')
""",
        fetch=("new\nline", "-rf", "--help", "..x", " ", "x" * 255, "*"),
        then="say('TRYING')\nsay('HELD' if not os.listdir('.') else 'ESCAPED', os.listdir('.'))",
        check=lambda result, facts: (
            "" if set(result.files.values()) <= {b"mine"} and "-rf" in result.files else f"fetched {dict(result.files)}"
        ),
        bare="held",
    ),
    case(
        "artifact_swapped_while_fetched",
        """
say('TRYING')
def swap():
    while True:
        try:
            open('s', 'w').write('mine')
            os.unlink('s')
            os.symlink(W['canary'], 's')
            os.unlink('s')
        except OSError:
            pass
for _ in range(2):
    if os.fork() == 0:
        swap()
import time
time.sleep(0.1)
say('HELD')
os._exit(0)
""",
        "proc",
        fetch=("s",),
        check=_no_host_file,
        census=True,
        bare="held",
    ),
]

STATE: list[EscapeCase] = [
    case(
        "module_state",
        """
say('TRYING')
import builtins, random
json.leaked = W['nonce']
builtins.leaked = W['nonce']
sys.modules['leaked'] = json
sys.path.insert(0, '/leaked')
os.environ['LEAKED'] = W['nonce']
os.umask(0)
random.seed(1)
json.loads = None
print = None
sys.setrecursionlimit(77)
say('HELD')
""",
        then="""
import builtins
for what, there in (('json', hasattr(json, 'leaked')), ('builtins', hasattr(builtins, 'leaked')), ('modules', 'leaked' in sys.modules),
                    ('path', '/leaked' in sys.path), ('environ', 'LEAKED' in os.environ), ('umask', os.umask(0o77) == 0),
                    ('loads', json.loads is None), ('recursion', sys.getrecursionlimit() == 77)):
    attempt(what, lambda: there or refuse('not there'))
""",
        bare="held",
    ),
    case(
        "kernel_state",
        """
try:
    open('/dev/shm/left', 'w')
except OSError:
    pass
attempt('shm', lambda: call(29, 194, 4712, 4096, 0o1666))
attempt('msg', lambda: call(68, 186, 4712, 0o1666))
attempt('sem', lambda: call(64, 190, 4712, 1, 0o1666))
attempt('mq', lambda: call(240, 180, b'left', 0o102, 0o666, None))
attempt('key', lambda: call(248, 217, b'user', b'left', b'v', 1, -4))
""",
        then="""
attempt('shm', lambda: call(29, 194, 4712, 4096, 0))
attempt('msg', lambda: call(68, 186, 4712, 0))
attempt('sem', lambda: call(64, 190, 4712, 1, 0))
attempt('mq', lambda: call(240, 180, b'left', 0, 0, None))
attempt('key', lambda: call(250, 219, 10, -4, b'user', b'left', 0))
attempt('/dev/shm', lambda: open('/dev/shm/left'))
""",
        # SysV objects would stay on the machine
        bare="unsafe",
        excepted=(Isolation.UID,),
    ),
    case(
        "limits_lowered",
        """
import resource
say('TRYING')
say('HELD')
for name in ('FSIZE', 'NOFILE', 'STACK', 'CORE', 'NPROC', 'MEMLOCK', 'SIGPENDING', 'DATA', 'AS'):
    which = getattr(resource, 'RLIMIT_' + name)
    try:
        resource.setrlimit(which, (0, 0))
    except (OSError, ValueError):
        pass
os._exit(7)
""",
        files={"x": b"given"},
        fetch=("x",),
        then="say('TRYING')\nopen('made', 'w').write('x')\nsay('HELD')",
        check=lambda result, facts: (
            "" if (result.exit_code, result.files.get("x")) == (7, b"given") else f"{result.status} {result.files}"
        ),
        bare="held",
    ),
    case(
        "core_dumps",
        """
import resource
# 1: the one value at which a core_pattern that is a pipe is not executed either.
attempt('size', lambda: resource.getrlimit(resource.RLIMIT_CORE)[1] != 1 and resource.getrlimit(resource.RLIMIT_CORE) or refuse('1'))
attempt('dumpable', lambda: _libc.prctl(3, 0, 0, 0, 0) or refuse('0'))
attempt('dumpable again', lambda: _libc.prctl(4, 1, 0, 0, 0) == 0 and _libc.prctl(3, 0, 0, 0, 0) or refuse('0'))
""",
    ),
    case(
        "exhausted_descriptors",
        """
say('TRYING')
kept = []
try:
    while len(kept) < 2000:
        kept.append(os.open('.', os.O_RDONLY))
except OSError:
    pass
say('ESCAPED' if len(kept) > 200 else 'HELD', len(kept))
open_more = None
os._exit(7)
""",
        fetch=("x",),
        files={"x": b"given"},
        check=lambda result, facts: "" if result.files.get("x") == b"given" else f"the fetch failed: {result.files}",
    ),
]

REPORTS: list[EscapeCase] = [
    *(
        case(
            name,
            f"say('TRYING')\nsay('HELD')\n{program}",
            check=lambda result, facts, status=status, code=code: (
                ""
                if result.status is status and result.exit_code == code
                else f"{result.status} {result.exit_code}, expected {status} {code}"
            ),
            bare="held",
        )
        for name, program, status, code in (
            ("exit_0_early", "os._exit(0)", ExecStatus.OK, 0),
            ("exit_by_hook", "sys.excepthook = lambda *a: os._exit(5)\nraise ValueError", ExecStatus.NONZERO, 5),
            (
                "exit_no_builtins",
                "import builtins\nfor n in dir(builtins): delattr(builtins, n)",
                ExecStatus.NONZERO,
                1,
            ),
        )
    ),
    case(
        "frames_of_the_supervisor",
        """
import gc
say('TRYING')
frame = sys._getframe()
while frame:
    for name, value in list(frame.f_globals.items()) + list(frame.f_locals.items()):
        if W['secret_prefix'] in repr(value)[:100000] and name not in ('W', 'value'):
            print('frame', name, repr(value)[:300])
    frame = frame.f_back
for thing in gc.get_objects():
    try:
        if isinstance(thing, dict) and thing is not W and any(isinstance(v, (str, bytes)) and W['secret_prefix'] in str(v) for v in list(thing.values())) and 'secret_prefix' not in thing:
            print('gc', repr(thing)[:300])
    except Exception:
        pass
say('HELD')
""",
        bare="held",
    ),
    case(
        "memory_of_itself",
        r"""
# The stack of the first thread ends in the environment and arguments that the process was started with.
say('TRYING')
r, w = os.pipe()
os.set_blocking(w, False)
libc_environ = ctypes.c_void_p.in_dll(ctypes.CDLL(None), 'environ').value or 0
spot = ctypes.create_string_buffer(8)
auxv = ctypes.CDLL(None).getauxval
auxv.restype, auxv.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
start = (auxv(31) or auxv(15)) & ~4095  # AT_EXECFN, a string at the very top of the stack.
for page in range(start - 64 * 4096, start + 16 * 4096, 4096):
    if _libc.write(w, ctypes.c_void_p(page), ctypes.c_size_t(4096)) != 4096:
        continue  # EFAULT: nothing is there.
    data = os.read(r, 4096)
    at = data.find(W['secret_prefix'].encode())
    if at >= 0 and data[at:at + 40].strip() != W['secret_prefix'].encode():
        print(data[at:at + 60])
say('HELD')
""",
    ),
    case(
        "tamper_with_the_supervisor",
        """
import gc
say('TRYING')
for module in list(sys.modules.values()):
    name = getattr(module, '__name__', '') or ''
    if 'agentenv' in name or 'zygote' in name or 'sandbox' in name:
        for key in list(vars(module)):
            if not key.startswith('__'):
                try:
                    setattr(module, key, None)
                except Exception:
                    pass
frame = sys._getframe().f_back
while frame:
    for key in list(frame.f_globals):
        if not key.startswith('__'):
            frame.f_globals[key] = None
    frame = frame.f_back
os._exit = lambda code: None
say('HELD')
sys.exit(7)
""",
        check=lambda result, facts: "" if result.exit_code in (7, 1, 255) else f"{result.status} {result.exit_code}",
        then="say('TRYING')\nsay('HELD')",
        bare="held",
    ),
]

SIGNALS: list[EscapeCase] = [
    case(
        "signal_by_owner_of_a_pipe_victim_only",
        """
import fcntl, signal
say('TRYING')
try:
    r, w = os.pipe()
    fcntl.fcntl(r, fcntl.F_SETOWN, W['victim'])
    fcntl.fcntl(r, 10, signal.SIGKILL)
    fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    os.write(w, b'x')
except OSError as error:
    print(error)
say('HELD', 'if the victim lives')
""",
        needs=("victim",),
    ),
    case(
        "signal_by_child_that_ends",
        """
import signal
say('TRYING')
for flags in (signal.SIGKILL, signal.SIGSTOP, 0x8000 | signal.SIGKILL):
    try:
        pid = call(56, 220, int(flags), 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
    except OSError as error:
        print(error)
say('HELD', 'if the next run works')
os._exit(0)
""",
        "proc",
        then="say('TRYING')\nsay('HELD')",
        ends=(ExecStatus.SIGNAL, *TIMED),
        limits=SHORT,
        census=True,
        bare="unsafe",
    ),
    case(
        "terminal",
        """
import fcntl
attempt('/dev/tty', lambda: os.open('/dev/tty', os.O_RDWR))
def push():
    for fd in range(0, 200):
        try:
            fcntl.ioctl(fd, 0x5412, b'x')  # TIOCSTI
            return fd
        except OSError:
            pass
        try:
            fcntl.ioctl(fd, 0x541C, b'\\x03')  # TIOCLINUX
            return fd
        except OSError:
            pass
    refuse('no terminal')
attempt('push input', push)
attempt('controlling', lambda: fcntl.ioctl(0, 0x540E, 0))
""",
        bare="held",
    ),
]

CHEATS: list[EscapeCase] = [
    case(
        "shipped_tasks",
        """
# Our own packages hold tasks with their hidden tests; the checkout may hold the data set of the run.
roots = [W['package'], W['envs'], os.path.dirname(W['package'])]
seen = [place for place in sys.path if place]
import sysconfig
seen += [sysconfig.get_path('purelib'), '/usr/lib/python3/dist-packages', '/usr/local/lib/python3.11/site-packages']
for place in seen:
    roots += [place + '/agentenv', place + '/agentenv_envs']
for root in dict.fromkeys(filter(None, roots)):
    attempt('list ' + root, lambda: os.listdir(root))
attempt('read', lambda: read(W['package'] + '/__init__.py'))
attempt('import', lambda: __import__('agentenv').__file__, ImportError)
""",
        excepted=(Isolation.UID,),
    ),
]
