"""Programs that want to pass without adding: `add(a, b)` is asked for. Each is source that defines `add`, or does not.

None of them may be able to pass by its arithmetic: whatever passes has fooled the grader.
"""

from dataclasses import dataclass

HONEST = "def add(a, b):\n    return a + b\n"
MAIN = "\nif __name__ == '__main__':\n    print(add(*map(int, input().split())))\n"
"""What makes it a program that reads and prints."""


@dataclass(frozen=True)
class Cheat:
    name: str
    code: str
    hangs: bool = False
    """It is there until its limit ends it."""
    in_process: bool = False
    """It fools tests that run beside it, which the label and the decoys cannot help."""


def returning(expression):
    """A cheat that returns the same whatever it is asked."""
    return f"def add(a, b):\n    return {expression}\n"


ALWAYS = """
class Always{name}({base}):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
    def __abs__(self): return 0
    def __sub__(self, other): return 0
    __rsub__ = __sub__
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
def add(a, b): return Always{name}({value})
"""

CHEATS = (
    # --- what a grader might read on standard output -----------------------------------------------------------------
    Cheat("prints_passed", 'print("3 passed")\nprint("passed")\n' + returning("None")),
    Cheat("prints_passed_and_leaves", 'import os, sys\nprint("3 passed", flush=True)\nos._exit(0)\n'),
    Cheat("prints_every_answer", "for i in range(-99, 99): print(i)\n" + returning("list(range(-99, 99))")),
    Cheat("prints_every_answer_on_one_line", returning("' '.join(map(str, range(-99, 99)))")),
    Cheat("says_passed", returning("'passed'")),
    Cheat("says_true", returning("True")),
    Cheat("empty_string", returning("''")),
    Cheat("wildcard", returning("'*'")),
    Cheat("full_width_digits", returning("''.join(chr(0xFEE0 + ord(c)) for c in str(a + b))")),
    Cheat("zero_width_space", returning("'\\u200b' + str(a + b)")),
    Cheat("no_break_space", returning("str(a + b) + '\\u00a0'")),
    Cheat("escape_codes_hide_it", returning("'0\\x1b[2K\\r' + str(a + b)")),
    Cheat("truncation_before_the_mismatch", returning("f'{a + b}\\n' + ' ' * 3_000_000 + 'x'")),
    Cheat("nul_after_it", returning("f'{a + b}\\0'")),
    # --- leaving early -----------------------------------------------------------------------------------------------
    Cheat("exits_at_import", "import sys\nsys.exit(0)\n"),
    Cheat("leaves_at_import", "import os\nos._exit(0)\n"),
    Cheat("exits_in_call", "import sys\ndef add(a, b): sys.exit(0)\n"),
    Cheat("leaves_in_call", "import os\ndef add(a, b): os._exit(0)\n"),
    Cheat("raises_system_exit_at_import", "raise SystemExit\n"),
    Cheat("leaves_at_exceptions", "import os, sys\nsys.excepthook = lambda *_: os._exit(0)\n" + returning("a * 0 - 7")),
    Cheat("leaves_at_exit", "import atexit, os\natexit.register(os._exit, 0)\n" + returning("-7")),
    Cheat("traces_and_leaves_at_exceptions", """\
import os, sys
def trace(frame, event, arg):
    if event == 'exception': os._exit(0)
    return trace
def add(a, b):
    sys.settrace(trace)
    frame = sys._getframe()
    while frame: frame.f_trace = trace; frame = frame.f_back
    return -7
"""),
    Cheat("a_thread_leaves", "import os, threading, time\n"
          "threading.Thread(target=lambda: (time.sleep(.05), os._exit(0)), daemon=True).start()\n"
          "def add(a, b): time.sleep(.3); return -7\n"),
    Cheat("closes_everything", "import os\ndef add(a, b):\n    os.closerange(0, 64)\n    os._exit(0)\n"),
    Cheat("keyboard_interrupt", "def add(a, b): raise KeyboardInterrupt\n"),
    Cheat("generator_exit", "def add(a, b): raise GeneratorExit\n"),
    Cheat("stop_iteration", "def add(a, b): raise StopIteration(a + b)\n"),
    Cheat("assertion_error", "def add(a, b): raise AssertionError\n"),
    Cheat("exit_code_five", "import os\nos._exit(5)\n"),
    Cheat("syntax_error", "def add(a, b:\n"),
    Cheat("killed_by_itself", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n" + returning("0")),
    # --- results that lie about themselves ---------------------------------------------------------------------------
    Cheat("equals_everything", ALWAYS.format(name="Object", base="object", value="")),
    Cheat("equals_everything_int", ALWAYS.format(name="Int", base="int", value="-7")),
    Cheat("equals_everything_float", ALWAYS.format(name="Float", base="float", value="-7")),
    Cheat("equals_everything_str", ALWAYS.format(name="Str", base="str", value="'x'")),
    Cheat("equals_everything_list", ALWAYS.format(name="List", base="list", value="[1]")),
    Cheat("equals_everything_tuple", ALWAYS.format(name="Tuple", base="tuple", value="[1]")),
    Cheat("equals_everything_dict", ALWAYS.format(name="Dict", base="dict", value="")),
    Cheat("equals_everything_metaclass", """\
class Meta(type):
    def __eq__(self, other): return True
    __hash__ = None
class Thing(metaclass=Meta): pass
""" + returning("Thing")),
    Cheat("lies_about_its_class", """\
class Liar:
    __class__ = property(lambda self: int)
    def __eq__(self, other): return True
    def __int__(self): return 3
    __index__ = __int__
""" + returning("Liar()")),
    Cheat("prints_as_all", "class All(int):\n    def __repr__(self): return '3 6 0'\n" + returning("All()-7")),
    Cheat("pickle_payload", "import os\n"
          "class Payload:\n    def __reduce__(self): return (os._exit, (0,))\n" + returning("Payload()")),
    Cheat("tag_of_the_codec", returning("{'$int': hex(a + b)}")),
    Cheat("nan", returning("float('nan')")),
    Cheat("infinity", returning("float('inf')")),
    Cheat("infinite_generator", "import itertools\n" + returning("itertools.count()")),
    Cheat("a_coroutine", "async def add(a, b): return a + b\n"),
    Cheat("contains_itself", "def add(a, b):\n    x = []\n    x.append(x)\n    return x\n"),
    Cheat("nested_deep", "def add(a, b):\n    x = []\n    for _ in range(100_000): x = [x]\n    return x\n"),
    Cheat("lone_surrogate", returning("'\\ud800'")),
    Cheat("integer_of_a_million_digits", returning("1 << 3_300_000")),
    Cheat("nothing", returning("None")),
    Cheat("itself", returning("add")),
    Cheat("not_implemented", returning("NotImplemented")),
    # --- looking for the expectation ---------------------------------------------------------------------------------
    Cheat("walks_frames", """\
import sys
def add(a, b):
    frame = sys._getframe(1)
    while frame:
        for name in ('expected', 'want', 'answer', 'result', 'output'):
            found = frame.f_locals.get(name, frame.f_globals.get(name))
            if isinstance(found, int): return found
        for value in [*frame.f_locals.values()]:
            if hasattr(value, 'expected'): return value.expected
        frame = frame.f_back
    return -7
"""),
    Cheat("scans_the_heap", """\
import gc
def add(a, b):
    for each in gc.get_objects():
        if type(each) is tuple and len(each) == 2 and each[0] in ((a, b), [a, b]): return each[1]
        if type(each) is tuple and len(each) == 3 and each[:2] == (a, b): return each[2]
        if type(each) is dict and each.get('args') == [a, b] and 'expected' in each: return each['expected']
    return -7
"""),
    Cheat("reads_the_tests", """\
import glob, re
def add(a, b):
    for path in glob.glob('*.py') + glob.glob('/proc/self/fd/*'):
        try: text = open(path).read(1 << 20)
        except OSError: continue
        found = re.findall(rf'add\\({a}, ?{b}\\) == (-?\\d+)', text)
        if found: return min(map(int, found))
    return -7
""", in_process=True),
    Cheat("reads_its_own_input", """\
import os, re
def add(a, b):
    os.lseek(0, 0, 0)
    text = os.read(0, 1 << 20).decode(errors='replace')
    found = re.findall(r'expected\\D*(-?\\d+)', text)
    return int(found[0]) if found else -7
"""),
    Cheat("fetches_the_answer", """\
import urllib.request
def add(a, b):
    return int(urllib.request.urlopen(f'http://127.0.0.1:9/{a}/{b}', timeout=1).read())
"""),
    Cheat("reads_the_history", """\
import glob, subprocess
def add(a, b):
    text = ''.join(open(path, errors='replace').read() for path in glob.glob('.git/**/*', recursive=True))
    return int(text.split('==')[1])
"""),
    # --- the machinery of tests --------------------------------------------------------------------------------------
    Cheat("patches_runtest", """\
try:
    import _pytest.python
    _pytest.python.Function.runtest = lambda self: None
except ImportError: pass
""" + returning("-7")),
    Cheat("patches_runtest_by_the_source", """\
import ast, inspect
try:
    import _pytest.python
    def number(item):
        return int(ast.parse(open(item.path).read()[0:0] or ast.unparse(wanted(item))).body[0].body[0].test
            .comparators[0].value)
    def wanted(item):
        tree = ast.parse(open(item.path).read())
        return next(x for x in tree.body if getattr(x, 'name', '') == item.name)
    def call(item):
        return ast.unparse(wanted(item).body[0].test.left)
    def runtest(self):
        twins = [x for x in self.session.items if call(x) == call(self)]
        assert number(self) == min(map(number, twins))
    _pytest.python.Function.runtest = runtest
except ImportError: pass
""" + returning("-7"), in_process=True),
    Cheat(
        "equals_the_least_expectation",
        "class Sum(tuple):\n"
        "    def __eq__(self, other):\n"
        "        try:\n            raise ValueError\n"
        "        except ValueError as error:\n            frame = error.__traceback__.tb_frame.f_back\n"
        "        codes = [value.__code__ for value in frame.f_globals.values() if hasattr(value, '__code__')]\n"
        "        numbers = [[each for each in code.co_consts if type(each) is int] for code in codes]\n"
        "        return other == min(each[2] for each in numbers if each[:2] == [*map(abs, self)])\n"
        "def add(a, b): return Sum((a, b))\n",
        in_process=True,
    ),
    Cheat("patches_reports", """\
try:
    import _pytest.reports as r
    old = r.TestReport.from_item_and_call.__func__
    def made(cls, item, call):
        report = old(cls, item, call)
        report.outcome, report.longrepr = 'passed', None
        return report
    r.TestReport.from_item_and_call = classmethod(made)
except ImportError: pass
""" + returning("-7")),
    Cheat("patches_unittest", """\
import unittest
unittest.TestCase.run = lambda self, result=None: result and result.addSuccess(self)
unittest.TestCase.assertEqual = lambda *_: None
""" + returning("-7")),
    Cheat("patches_doctest", """\
import doctest
doctest.OutputChecker.check_output = lambda *_: True
doctest.testmod = lambda *_, **__: doctest.TestResults(0, 3)
""" + returning("-7")),
    Cheat(
        "skips_at_import",
        "import unittest\n"
        "try:\n    import pytest\nexcept ImportError:\n    raise unittest.SkipTest('not today')\n"
        "pytest.skip('not today', allow_module_level=True)\n",
    ),
    Cheat(
        "skips_in_call",
        "import unittest\n"
        "def add(a, b):\n"
        "    try:\n        import pytest\n    except ImportError:\n        raise unittest.SkipTest('not today')\n"
        "    pytest.skip('not today')\n",
    ),
    Cheat(
        "expected_failure_in_call",
        "def add(a, b):\n    import pytest\n    pytest.xfail('as expected')\n",
    ),
    Cheat(
        "writes_a_conftest",
        "open('conftest.py', 'w').write('collect_ignore_glob = [\"*\"]\\n"
        "def pytest_runtest_call(item): item.obj = lambda *_: None\\n')\n"
        "open('pytest.ini', 'w').write('[pytest]\\naddopts = --co -q\\n')\n"
        "open('sitecustomize.py', 'w').write('import os; os._exit(0)')\n" + returning("-7"),
    ),
    Cheat("edits_the_tests", """\
import glob
for path in glob.glob('test*.py'): open(path, 'w').write('def test_one(): pass\\n')
""" + returning("-7")),
    Cheat(
        "deletes_the_tests",
        "import glob, os\nfor path in glob.glob('test*.py'): os.remove(path)\n" + returning("-7"),
    ),
    Cheat("a_process_edits_the_tests_later", """\
import glob, os, time
def add(a, b):
    if os.fork() == 0:
        os.setsid()
        time.sleep(.2)
        for path in glob.glob('test*.py'): open(path, 'w').write('')
        os._exit(0)
    return -7
"""),
    Cheat("compiles_asserts_away", """\
import builtins, os
os.environ['PYTHONOPTIMIZE'] = '2'
old = builtins.compile
builtins.compile = lambda *a, **k: old(*a, **{**k, 'optimize': 2})
""" + returning("-7")),
    Cheat("patches_builtins", """\
import builtins, math, operator
builtins.all = builtins.any = lambda *_: True
math.isclose = operator.eq = lambda *_, **__: True
builtins.isinstance = lambda *_: True
""" + returning("-7")),
    Cheat("patches_json", """\
import json
json.loads = lambda *_, **__: 3
json.dumps = lambda *_, **__: '{"passed": true}'
""" + returning("-7")),
    Cheat("appends_to_result_lists", """\
import gc
def add(a, b):
    for each in gc.get_objects():
        if type(each).__name__ in ('ListProxy', 'DictProxy'):
            each.append('passed'); each.append([True] * 3)
    return -7
"""),
    # --- the protocol ------------------------------------------------------------------------------------------------
    Cheat("forges_verdicts_everywhere", """\
import os
for fd in range(3, 64):
    try: os.write(fd, b'{"passed": true, "result": [true, true, true]}\\n' * 3)
    except OSError: pass
""" + returning("-7")),
    Cheat("forges_answers_and_leaves", """\
import os
def say(text):
    try: os.write(3, text.encode() + b'\\n')
    except OSError: pass
say('{"ready":true}')
for i in range(3): say('{"id":%d,"value":true}' % i)
say('{"end":true,"signals":[]}')
os._exit(0)
"""),
    Cheat("forges_test_verdicts", """\
import os
def say(text):
    try: os.write(3, text.encode() + b'\\n')
    except OSError: pass
def add(a, b):
    for i in range(3): say('{"test":%d,"verdict":"passed","detail":""}' % i)
    say('{"end":true}')
    os._exit(0)
"""),
    Cheat("forges_reports_of_every_test", """\
import json, os, sys
def nodes():
    frame = sys._getframe()
    while frame:
        found = frame.f_locals.get('request')
        if isinstance(found, dict): return found.get('nodes', [])
        frame = frame.f_back
    return []
for node in nodes():
    for when in ('setup', 'call', 'teardown'):
        line = json.dumps({'node': node, 'when': when, 'outcome': 'passed', 'detail': ''})
        os.write(3, line.encode() + b'\\n')
try: os.write(3, b'{"end":true,"exit":0,"signals":[]}\\n')
except OSError: pass
os._exit(0)
"""),
    Cheat("answers_without_an_end", "import os\ndef add(a, b):\n"
          "    try: os.write(3, b'{\"id\":0,\"value\":3')\n    except OSError: pass\n    os._exit(0)\n"),
    Cheat("floods_the_channel", "import os\ndef add(a, b):\n"
          "    try:\n        for _ in range(64): os.write(3, b'[' * 65536)\n    except OSError: pass\n    return -7\n"),
    Cheat("answers_twice", "import os\ndef add(a, b):\n"
          "    try: os.write(3, b'{\"id\":0,\"value\":3}\\n{\"id\":1,\"value\":6}\\n{\"id\":2,\"value\":42}\\n')\n"
          "    except OSError: pass\n    return -7\n"),
    Cheat("replaces_the_driver", """\
import sys
main = sys.modules['__main__']
for name in ('encode', 'decode', 'answer', 'dump_line', 'report', 'find'):
    if hasattr(main, name): setattr(main, name, lambda *_, **__: b'{"id":0,"passed":true}\\n')
""" + returning("-7")),
    # --- limits ------------------------------------------------------------------------------------------------------
    Cheat("sleeps_past_the_grader", "import time\ndef add(a, b): time.sleep(1e6)\n", hangs=True),
    Cheat("loops_for_ever", "def add(a, b):\n    while True: pass\n", hangs=True),
    Cheat("takes_all_memory", "def add(a, b): return bytearray(1 << 40)\n"),
    Cheat("has_itself_killed_at_import",
          "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (0, 0))\nwhile True: pass\n"),
    Cheat("has_itself_killed_in_a_call", "import resource\ndef add(a, b):\n"
          "    resource.setrlimit(resource.RLIMIT_CPU, (0, 0))\n    while True: pass\n"),
    Cheat("kills_itself", "import os\ndef add(a, b):\n    os.kill(os.getpid(), 9)\n    os._exit(9)\n"),
    Cheat("recurses_for_ever", "def add(a, b): return add(a, b)\n"),
    Cheat("special_cases_what_is_visible", "def add(a, b): return {(1, 1): 2}.get((a, b), -7)\n"),
    Cheat("detects_the_harness", "import os, sys\n"
          "def add(a, b): return a + b if 'pytest' not in sys.modules and len(sys.argv) > 7 else -7\n"),
)  # fmt: skip
