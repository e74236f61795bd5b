"""A port for a server that cannot choose one itself."""

import contextlib
import socket


@contextlib.contextmanager
def held_port():
    """Yield a port of this machine that no other process is given: it is bound, and free for who asks for it by number.

    Both sockets have SO_REUSEADDR, as servers do, and this one never listens.
    """
    with socket.socket() as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", 0))
        yield place.getsockname()[1]
