"""Programs that mean harm: name, code, and the failures that are right for it."""

from __future__ import annotations

_IGNORE = (
    "import os, signal, threading\nfor n in (1, 2, 3, 14, 15): signal.signal(n, signal.SIG_IGN)\n"
)
HOSTILE: dict[str, tuple[str, set[str]]] = {
    "C loop": ("sum(range(10**12))", {"timeout"}),
    "big power": ("9 ** 9 ** 9", {"timeout", "memory"}),
    "regular expression": ("import re\nre.match('(a+)+$', 'a' * 40 + 'b')", {"timeout"}),
    "all signals ignored": (_IGNORE + "while True: pass", {"timeout"}),
    "all signals blocked": (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
        {"timeout"},
    ),
    "interrupt caught": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        {"timeout"},
    ),
    "lock held": (_IGNORE + "l = threading.Lock()\nl.acquire()\nl.acquire()", {"timeout"}),
    "threads that spin": (
        "import threading\ndef f():\n    while True: pass\n"
        "for _ in range(8): threading.Thread(target=f, daemon=True).start()\nf()",
        {"timeout", "cpu"},
    ),
    "alarm kills": ("import signal, time\nsignal.setitimer(0, 0.1)\ntime.sleep(9)", {"crash"}),
    "stops itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", {"timeout"}),
    "kills everybody": ("import os\nos.kill(-1, 9)", {"exception"}),
    "kills its supervisor": ("import os\nos.kill(1, 9)\nos._exit(1)", {"crash"}),
    "fork bomb": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        {"timeout", "processes"},
    ),
    "threads without end": (
        "import threading, time\nwhile True:\n"
        "    threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
        {"processes"},
    ),
    "daemons": (
        "import subprocess\nwhile True: subprocess.Popen(['sleep', '99'], start_new_session=True)",
        {"processes"},
    ),
    "memory at once": ("bytearray(10**10)", {"memory"}),
    "memory by and by": ("x = []\nwhile True: x.append('y' * 10**6 + str(len(x)))", {"memory"}),
    "memory of children": (
        "import os\nfor _ in range(6):\n    if not os.fork(): break\n"
        "x = bytearray(60_000_000)\nfor i in range(0, len(x), 4096): x[i] = 1\n"
        "import time\ntime.sleep(99)",
        {"memory", "timeout"},
    ),
    "long file": ("f = open('f', 'wb')\nwhile True: f.write(b'x' * 10**6)", {"disk"}),
    "many files": (
        "i = 0\nwhile True:\n    i += 1\n    open(f'f{i}', 'w').close()",
        {"disk", "timeout"},
    ),
    "open files": ("x = []\nwhile True: x.append(open('/dev/zero'))", {"open_files"}),
    "output": ("while True: print('x' * 10**6)", {"output"}),
    "output past Python": ("import os\nwhile True: os.write(2, b'x' * 10**5)", {"output"}),
    "output of a child": ("import subprocess\nsubprocess.run(['yes'])", {"output"}),
    "closes everything": ("import os\nos.closerange(0, 1000)", {"crash", "exception"}),
    "writes to the control channel": (
        "import os\nos.write(3, b'\\x00\\x00\\x00\\x02{}' * 9)\nwhile True: pass",
        {"crash", "timeout"},
    ),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f([x]) + repr(x)\nf(1)",
        {"crash", "memory", "timeout", "exception"},
    ),
    "deletes its folder": (
        "import os, shutil\nshutil.rmtree(os.getcwd(), ignore_errors=True)\nos.getcwd()\n1 / 0",
        {"exception"},
    ),
    "reads the server's memory": (
        "import os\nopen(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
        {"exception"},
    ),
    "reads other sessions": (
        "import os\nassert [p for p in os.listdir('/proc') if p.isdigit()] == ['1', '2'], 1\n"
        "assert os.listdir('/home') == ['user'] and os.listdir('/tmp') == []\n"
        "open('/proc/1/environ').read()",
        {"exception"},
    ),
    "network": ("import socket\nsocket.create_connection(('1.1.1.1', 80), 1)", {"exception"}),
    "ends the interpreter": ("import ctypes\nctypes.string_at(8)", {"crash"}),
}
