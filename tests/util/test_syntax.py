"""Syntax trees of Python source."""

import ast
import gc
import threading
import time

from agentenv._util.syntax import parse_source

SOURCE = "def f(a):\n    return [a, (a, {1: [a, a + 1 * 2 - 3]})]\n" * 20


def test_threads_that_parse_concurrently_get_their_trees():
    """The collector calls Python code in the middle of a tree, and so lets another thread run."""
    failures = []

    def parse(depth):
        if depth:
            parse(depth - 1)
            return
        for _ in range(10):
            try:
                assert ast.unparse(parse_source(SOURCE)).count("def f") == 20
            except SystemError as error:
                failures.append(error)

    def switch(phase, info):
        time.sleep(0)

    threshold = gc.get_threshold()
    gc.callbacks.append(switch)
    gc.set_threshold(20)
    try:
        threads = [threading.Thread(target=parse, args=(5 * index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(switch)
    assert failures == []
