"""Attacks on the sandbox itself: its reports, folders and names, state that outlives a run, and what programs share:
the host user's quotas and priority, the host's names, and the zygote's memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentenv.sandbox.types import ExecResult, ExecStatus, Isolation
from tests.sandbox.escapes.cases import LIMITS, SHORT, EscapeCase, case


def _no_host_file(result: ExecResult, facts: dict[str, Any]) -> str:
    """Check that no fetched file has content of the host."""
    with open("/etc/passwd", "rb") as file:
        passwd = file.read()
    return next((f"{name} holds the host's file" for name, data in result.files.items() if data and data in passwd), "")


BEYOND: list[EscapeCase] = [
    case("artifact_symlink", """
say('TRYING')
for name, target in (('a', '/etc/passwd'), ('b', W['canary']), ('c', '/proc/self/environ'), ('f', 'd/passwd'), ('g', '../' * 30 + W['canary'])):
    os.symlink(target, name)
os.symlink('/etc', 'd')
os.symlink(os.path.dirname(W['canary']), 'e')
say('HELD', 'if the host fetches none of it')
""", fetch=("a", "b", "c", "d/passwd", "e/canary", "f", "g"), check=_no_host_file),
    case("artifact_swapped_while_fetched", """
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
""", "proc", fetch=("s",), check=_no_host_file, census=True),
    case("module_state", """
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
""", then="""
import builtins
for what, there in (('json', hasattr(json, 'leaked')), ('builtins', hasattr(builtins, 'leaked')), ('modules', 'leaked' in sys.modules),
                    ('path', '/leaked' in sys.path), ('environ', 'LEAKED' in os.environ), ('umask', os.umask(0o77) == 0),
                    ('loads', json.loads is None), ('recursion', sys.getrecursionlimit() == 77)):
    attempt(what, lambda: there or refuse('not there'))
"""),
    case("kernel_state", """
try:
    open('/dev/shm/left', 'w')
except OSError:
    pass
attempt('shm', lambda: call(29, 194, 4712, 4096, 0o1666))
attempt('msg', lambda: call(68, 186, 4712, 0o1666))
attempt('sem', lambda: call(64, 190, 4712, 1, 0o1666))
attempt('mq', lambda: call(240, 180, b'left', 0o102, 0o666, None))
attempt('key', lambda: call(248, 217, b'user', b'left', b'v', 1, -4))
""", then="""
attempt('shm', lambda: call(29, 194, 4712, 4096, 0))
attempt('msg', lambda: call(68, 186, 4712, 0))
attempt('sem', lambda: call(64, 190, 4712, 1, 0))
attempt('mq', lambda: call(240, 180, b'left', 0, 0, None))
attempt('key', lambda: call(250, 219, 10, -4, b'user', b'left', 0))
attempt('/dev/shm', lambda: open('/dev/shm/left'))
""", excepted=(Isolation.UID,)),
    case("limits_lowered", """
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
""", files={"x": b"given"}, fetch=("x",), then="say('TRYING')\nopen('made', 'w').write('x')\nsay('HELD')",
        check=lambda result, facts: (
            "" if (result.exit_code, result.files.get("x")) == (7, b"given") else f"{result.status} {result.files}"
        )),
    case("core_dumps", """
import resource
# 1: the one value at which a core_pattern that is a pipe is not executed either.
attempt('size', lambda: resource.getrlimit(resource.RLIMIT_CORE)[1] != 1 and resource.getrlimit(resource.RLIMIT_CORE) or refuse('1'))
attempt('dumpable', lambda: _libc.prctl(3, 0, 0, 0, 0) or refuse('0'))
attempt('dumpable again', lambda: _libc.prctl(4, 1, 0, 0, 0) == 0 and _libc.prctl(3, 0, 0, 0, 0) or refuse('0'))
"""),
    case("memory_of_itself", r"""
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
"""),
    case("tamper_with_the_supervisor", """
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
""", check=lambda result, facts: "" if result.exit_code in (7, 1, 255) else f"{result.status} {result.exit_code}",
        then="say('TRYING')\nsay('HELD')"),
    case("signal_by_child_that_ends", """
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
""", "proc", then="say('TRYING')\nsay('HELD')",
        ends=(ExecStatus.SIGNAL, ExecStatus.CPU_TIMEOUT, ExecStatus.WALL_TIMEOUT), limits=SHORT, census=True),
    case("shipped_tasks", """
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
""", excepted=(Isolation.UID,)),
    case(
        "memory_of_an_earlier_program",
        # A comment of 60 KB, which a heap keeps after it was freed.
        f"#{'thgin yb rats eht dnif ' * 2600}\nsay('TRYING')\nsay('HELD', 'if the next run finds nothing')",
        fetch=("nothing",),
        then="""
_libc.sbrk.restype = _libc.memmem.restype = ctypes.c_void_p
line = b'find the star by night '[::-1]
end = _libc.sbrk(0) & ~4095
start = end
while _libc.msync(ctypes.c_void_p(start - 4096), ctypes.c_size_t(4096), 1) == 0:  # it is mapped
    start -= 4096
def scan():
    found, place = 0, start
    while at := _libc.memmem(ctypes.c_void_p(place), ctypes.c_size_t(end - place), line, ctypes.c_size_t(len(line))):
        found, place = found + 1, at + 1
    return found if found > 20 else refuse(found)
attempt('heap', scan)
""",
        limits=replace(LIMITS, cpu_s=3.0),
    ),
    case("priority_of_the_user", """
surface('user', lambda: os.setpriority(os.PRIO_USER, 0, 19))
surface('user by id', lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19))
surface('lowest of the user', lambda: os.getpriority(os.PRIO_USER, 0))
surface('with high bits', lambda: call(141, 140, 2 | 1 << 32, 0, 19))
"""),
    case("timers_of_the_user", """
def timers():
    timer = ctypes.c_void_p()
    for made in range(2000):
        if call(222, 107, 1, None, ctypes.byref(timer)):
            break
    return made
attempt('2000 timers', timers)
def signals():
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN + 5})
    info = (ctypes.c_int * 32)(signal.SIGRTMIN + 5, 0, -1, 0)
    for sent in range(2000):
        call(129, 138, os.getpid(), int(signal.SIGRTMIN + 5), info)
    return sent
attempt('2000 queued signals', signals)
""", limits=replace(LIMITS, cpu_s=3.0)),
    case(
        "name_of_the_host",
        "attempt('uname', lambda: os.uname().nodename == W['host_name'] or refuse('another'))",
        # Without a UTS namespace, nothing hides it.
        excepted=(Isolation.LANDLOCK, Isolation.UID),
    ),
]  # fmt: skip
