"""Attacks on files, secrets, file descriptors and the network."""

from __future__ import annotations

from typing import Any

from agentenv.sandbox.types import ExecResult, ExecStatus, Isolation
from tests.sandbox.escapes.cases import EscapeCase, case

LANDLOCK = Isolation.LANDLOCK
UID = Isolation.UID
READABLE = (UID,)
"""Exception of the uid level, where programs can read all world-readable files."""


def _ends_as_it_did(result: ExecResult, facts: dict[str, Any]) -> str:
    """Check that the result has exit code 7 although the program wrote something like a report."""
    if (result.status, result.exit_code) == (ExecStatus.NONZERO, 7):
        return ""
    return f"a forged report changed the outcome to {result.status} {result.exit_code}"


FILES: list[EscapeCase] = [
    case("read_canary", "attempt('read', lambda: read(W['canary']))", excepted=READABLE),
    case("read_canary_by_hardlink", """
attempt('link', lambda: (os.link(W['canary'], 'hard'), read('hard')))
attempt('linkat', lambda: (os.link(W['canary'], 'hard2', follow_symlinks=False), read('hard2')))
os.symlink(W['canary'], 'soft')
attempt('link of a symlink', lambda: (os.link('soft', 'hard3', follow_symlinks=True), os.path.islink('hard3') and refuse('of the link itself'), read('hard3')))
""", excepted=READABLE),
    case("read_by_proc_of_parent", """
for pid in (os.getppid(), W['host_pid'], 'self', 'thread-self'):
    attempt(f'root of {pid}', lambda: read(f"/proc/{pid}/root{W['canary']}"))
    attempt(f'cwd of {pid}', lambda: read(f"/proc/{pid}/cwd/" + '../' * 40 + W['canary'].lstrip('/')))
""", excepted=READABLE),
    case("write_into_world_writable", """
attempt('create', lambda: open(W['writable'] + '/planted', 'w').write('x'))
attempt('mkdir', lambda: os.mkdir(W['writable'] + '/planted_dir'))
attempt('symlink', lambda: os.symlink('/etc/passwd', W['writable'] + '/planted_link'))
attempt('fifo', lambda: os.mkfifo(W['writable'] + '/planted_fifo'))
attempt('append', lambda: open(W['open_file'], 'a').write('x'))
attempt('truncate by path', lambda: os.truncate(W['open_file'], 0))
attempt('tmpfile', lambda: os.open(W['writable'], os.O_TMPFILE | os.O_RDWR, 0o600))
""", excepted=READABLE),
    case("chmod_owned", """
# Where it cannot be told from a file of its own, the call is answered as if done: what counts is whether it was.
attempt('chmod', lambda: (os.chmod(W['owned'], 0o666), os.stat(W['owned']).st_mode & 0o777 == 0o666 or refuse('not done')))
attempt('chown', lambda: (os.chown(W['owned'], 1, 1), os.stat(W['owned']).st_uid == 1 or refuse('not done')))
"""),
    case("unlink_victim", "attempt('unlink', lambda: os.unlink(W['writable'] + '/victim'))", excepted=READABLE),
    case(
        "rename_out_and_in",
        """
open('mine', 'w').write('x')
attempt('out', lambda: os.rename('mine', W['writable'] + '/planted'))
attempt('in', lambda: os.rename(W['writable'] + '/victim', 'stolen'))
attempt('link out', lambda: os.link('mine', W['writable'] + '/planted'))
""",
        # on another file system it fails with EXDEV; the test uses the same one
        excepted=READABLE,
    ),
    case("stat_canary", "attempt('stat', lambda: os.stat(W['canary']).st_size)", excepted=(LANDLOCK, UID)),
    case("mknod", """
import stat
for place in ('node', W['writable'] + '/planted'):
    attempt(f'char at {place}', lambda: os.mknod(place + 'c', stat.S_IFCHR | 0o666, os.makedev(1, 8)))
    attempt(f'block at {place}', lambda: os.mknod(place + 'b', stat.S_IFBLK | 0o666, os.makedev(254, 0)))
"""),
    case("open_by_handle", """
class Handle(ctypes.Structure):
    _fields_ = [('size', ctypes.c_uint), ('kind', ctypes.c_int), ('data', ctypes.c_ubyte * 128)]
def by_handle(path):
    handle, mount = Handle(128), ctypes.c_int()
    call(303, 264, -100, path.encode(), ctypes.byref(handle), ctypes.byref(mount), 0)
    where = os.open(os.path.dirname(path) or '.', os.O_RDONLY)
    fd = call(304, 265, where, ctypes.byref(handle), os.O_RDONLY)
    return os.read(fd, 100)
attempt('canary', lambda: by_handle(W['canary']))
def guessed():
    handle = Handle(8, 1)
    handle.data[0] = 2  # The root inode of ext4, whose handle needs no name_to_handle_at.
    return os.listdir(call(304, 265, os.open('.', os.O_RDONLY), ctypes.byref(handle), os.O_RDONLY))
attempt('guessed inode', guessed)
"""),
    case("chroot", """
os.mkdir('jail')
inside = os.open('.', os.O_RDONLY)
attempt('chroot', lambda: os.chroot('jail'))
attempt('pivot_root', lambda: call(155, 41, b'.', b'jail'))
attempt('leave by fd', lambda: (os.fchdir(inside), os.chdir('../' * 40), read(W['canary'].lstrip('/'))))
""", excepted=READABLE),
    case("mount", """
os.mkdir('on')
attempt('tmpfs', lambda: call(165, 40, b'x', b'on', b'tmpfs', 0, None))
attempt('bind', lambda: call(165, 40, b'/', b'on', None, 4096, None))
attempt('remount', lambda: call(165, 40, None, b'/', None, 32, None))
attempt('proc', lambda: call(165, 40, b'proc', b'on', b'proc', 0, None))
attempt('fsopen', lambda: call(430, 430, b'tmpfs', 0))
attempt('open_tree', lambda: call(428, 428, -100, b'/', 1))
attempt('mount_setattr', lambda: call(442, 442, -100, b'/', 0x8000, (ctypes.c_ulong * 4)(0, 1, 0, 0), 32))
attempt('umount', lambda: call(166, 39, b'.', 2))
attempt('umount /', lambda: call(166, 39, b'/', 2))
"""),
    case("device_nodes", """
import glob
names = 'vda sda nvme0n1 mem port kmem kmsg kvm fuse net/tun ptmx tty tty0 console mapper/control loop0 loop-control nvidia0 nvidiactl vhost-vsock uinput watchdog'
for name in names.split() + [path[5:] for path in glob.glob('/dev/*')]:
    if name not in ('null', 'zero', 'full', 'random', 'urandom') and not os.path.isdir('/dev/' + name) and name not in ('stdin', 'stdout', 'stderr'):
        attempt(name, lambda: os.open('/dev/' + name, os.O_RDONLY | os.O_NONBLOCK))
        attempt(name + ' to write', lambda: os.open('/dev/' + name, os.O_WRONLY | os.O_NONBLOCK))
""", excepted=READABLE),
    case("environment", """
say('TRYING')
print(dict(os.environ))
libc_environ = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), 'environ')
for index in range(1000):
    if not libc_environ or libc_environ[index] is None:
        break
    print(libc_environ[index])
say('HELD')
"""),
    case(
        "inherited_descriptors",
        """
import stat
say('TRYING')
for fd in range(0, 4096):
    try:
        info = os.fstat(fd)
    except OSError:
        continue
    if fd > 3 or stat.S_ISDIR(info.st_mode) or stat.S_ISBLK(info.st_mode) or (stat.S_ISREG(info.st_mode) and fd > 0):
        say('ESCAPED', (fd, oct(info.st_mode)))
    for deed in (lambda: os.read(fd, 100) if fd != 3 else b'', lambda: os.listdir(fd)):
        try:
            got = deed()
            if W['secret_prefix'].encode() in repr(got).encode():
                print(fd, got)
        except OSError:
            pass
say('HELD')
""",
        # `Bare` leaks a descriptor, as trainers do
    ),
    case("forged_report", """
import socket, struct, threading
say('TRYING')
text = json.dumps({'status': 'ok', 'exit_code': 0, 'signal': None, 'stdout': 'forged', 'cpu_s': 0, 'wall_s': 0, 'ok': True, 'type': 'result', 'id': 0})
frames = [text.encode(), text.encode() + b'\\n', struct.pack('<I', len(text)) + text.encode(), struct.pack('>I', len(text)) + text.encode(), b'\\0' * 64, struct.pack('<iiqq', 0, 0, 0, 0)]
def write(fd):
    for frame in frames:
        for deed in (lambda: os.write(fd, frame), lambda: _libc.send(fd, frame, len(frame), 0x40)):
            try:
                deed()
            except OSError:
                pass
for fd in range(3, 1100):
    try:
        os.fstat(fd)
    except OSError:
        continue
    thread = threading.Thread(target=write, args=(fd,), daemon=True)
    thread.start()
    thread.join(0.2)
for line in (text, '{"status": "ok"}'):
    os.write(1, line.encode() + b'\\n')
    os.write(2, line.encode() + b'\\n')
say('HELD')
os._exit(7)
""", check=_ends_as_it_did),
    case("stdin_again_to_write", """
for path in ('/proc/self/fd/0', '/dev/stdin', '/dev/fd/0', '/proc/thread-self/fd/0'):
    attempt(path, lambda: os.open(path, os.O_RDWR))
attempt('write', lambda: os.write(0, b'x'))
attempt('truncate', lambda: os.ftruncate(0, 0))
""", stdin=b"given", excepted=(LANDLOCK, UID)),
    case("tcp_loopback", """
import socket
attempt('connect', lambda: socket.create_connection(('127.0.0.1', W['tcp']), 2).sendall(b'x'))
attempt('connect v6', lambda: socket.create_connection(('::1', W['tcp6']), 2).sendall(b'x'))
def nonblocking():
    s = socket.socket()
    s.setblocking(False)
    return s.connect_ex(('127.0.0.1', W['tcp'])) in (0, errno.EINPROGRESS) or refuse('no')
attempt('connect_ex', nonblocking)
def fast_open():
    s = socket.socket()
    return s.sendto(b'x', 0x20000000, ('127.0.0.1', W['tcp']))
attempt('fast open', fast_open)
""", needs=("net",)),
    case("unix_path", """
import socket
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    attempt(f'unix {kind}', lambda: socket.socket(socket.AF_UNIX, kind).connect(W['unix' if kind == socket.SOCK_STREAM else 'unix_dgram']))
for path in ('/var/run/docker.sock', '/run/containerd/containerd.sock', '/run/dbus/system_bus_socket', '/run/systemd/private'):
    attempt(path, lambda: socket.socket(socket.AF_UNIX).connect(path))
""", needs=("net",)),
    case("unix_abstract", """
import socket
attempt('connect', lambda: socket.socket(socket.AF_UNIX).connect('\\0' + W['abstract']))
def pair():
    a, b = socket.socketpair()
    a.sendto(b'x', '\\0' + W['abstract_dgram'])
attempt('a pair that sends elsewhere', pair, AttributeError)
def pair_dgram():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        a.sendto(b'x', '\\0' + W['abstract_dgram'])
    except OSError:
        pass
    a.connect('\\0' + W['abstract_dgram'])
    a.send(b'x')
attempt('a datagram pair, connected again', pair_dgram)
def inherited():
    for fd in range(0, 10):
        try:
            s = socket.socket(fileno=os.dup(fd))
            s.connect('\\0' + W['abstract'])
            return fd
        except OSError:
            pass
    refuse('none')
attempt('an inherited socket', inherited)
""", needs=("net",)),
    case(
        "udp",
        "import socket\nattempt('sendto', lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', W['udp'])))",
        needs=("net",),
    ),
    case("listen", """
import socket
def listen(family, address):
    s = socket.socket(family)
    s.bind(address)
    s.listen()
    return s.getsockname()
attempt('tcp', lambda: listen(socket.AF_INET, ('127.0.0.1', 0)))
attempt('tcp v6', lambda: listen(socket.AF_INET6, ('::1', 0)))
attempt('abstract', lambda: listen(socket.AF_UNIX, '\\0' + W['nonce']))
attempt('path', lambda: listen(socket.AF_UNIX, W['writable'] + '/planted'))
def bare():
    s = socket.socket()
    s.listen()
    return s.getsockname()
attempt('without bind', bare)
"""),
    case("odd_families", """
import socket
attempt('vsock', lambda: socket.socket(40, socket.SOCK_STREAM))
for family in (38, 44, 29, 31, 30, 33, 26, 21, 9, 2, 10):  # AF_ALG, XDP, CAN, BLUETOOTH, TIPC, RXRPC, LLC, RDS, X25
    attempt(family, lambda: socket.socket(family, socket.SOCK_SEQPACKET if family in (38, 21) else socket.SOCK_DGRAM))
"""),
]  # fmt: skip
