# ruff: noqa: E501  programs of one line
"""The sandbox for model-written code: attacks on it in both forms.

An attack prints ESCAPED where it got what it wanted. Here we look at what it did to the machine.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sandbox_attacks import TIGHT, attack, left, wait_until

from spmdrl.config import ConfigError
from spmdrl.rewards.runner import resolve_reward
from spmdrl.rewards.sandbox import limits as sandbox_watch
from spmdrl.rewards.sandbox import sandbox
from spmdrl.rewards.sandbox import seccomp as sandbox_seccomp
from spmdrl.rewards.sandbox.sandbox import Limits, Result, ask_value, run_code, run_tests

pytestmark = [pytest.mark.sandbox, pytest.mark.clock]


# --- what a program finds


def test_a_program_reads_prints_and_ends(form):
    number = random.randrange(10**9)
    r = attack(
        "import sys; n = int(input()); print(n + 1); print('e', file=sys.stderr)",
        TIGHT,
        f"{number}\n",
    )
    assert (r.status, r.exit_code, r.stdout, r.stderr) == ("ok", 0, f"{number + 1}\n", "e\n")
    assert attack("raise SystemExit(7)").exit_code == 7
    r = attack("def f():\n    return 1 / 0\nf()")
    assert r.status == "error" and r.exit_code == 1
    assert r.stderr.startswith('Traceback (most recent call last):\n  File "main.py", line 3')
    r = attack("def f(:")
    assert r.status == "error" and "SyntaxError" in r.stderr
    assert (
        attack("import atexit; atexit.register(print, 'end'); print('\u00e9\u4e2d')").stdout
        == "\u00e9\u4e2d\nend\n"
    )
    assert attack("import __main__; x = 3; print(__main__.x, __name__)").stdout == "3 __main__\n"


def test_usual_things_work(strong):
    r = attack("""
        import asyncio, collections, heapq, itertools, json, math, re, subprocess, sys, tempfile, threading
        async def f():
            await asyncio.sleep(0.01)
            print("async")
        asyncio.run(f())
        t = threading.Thread(target=print, args=("thread",)); t.start(); t.join()
        with tempfile.NamedTemporaryFile("w+") as file:
            file.write("file"); file.seek(0); print(file.read())
        print(subprocess.run([sys.executable, "-c", "print('child')"], capture_output=True, text=True).stdout)
        sys.setrecursionlimit(30000)
        def deep(n): return n and 1 + deep(n - 1)
        print(deep(20000))
    """)
    assert r.stdout.split() == ["async", "thread", "file", "child", "20000"], r


def test_nothing_of_ours_is_inherited(form, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    with open(__file__) as file:
        os.set_inheritable(file.fileno(), True)
        high = os.dup2(file.fileno(), 200)
        try:
            r = attack("""
                import os
                print(sorted(os.environ))
                for fd in range(1024):
                    try: os.fstat(fd)
                    except OSError: continue
                    print(fd)
            """)
        finally:
            os.close(high)
    names, *fds = r.stdout.split("\n")
    assert fds == ["0", "1", "2", ""]
    assert set(eval(names)) <= {"HOME", "LANG", "LC_CTYPE", "PATH", "PWD", "PYTHONHASHSEED"} | {
        "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"
    }  # fmt: skip


def test_the_folder_is_empty_and_its_own(strong):
    program = "import os; print(os.getcwd(), os.listdir('.')); open('a', 'w').close()"
    for result in run_tests(program, "run", [b"", b""], TIGHT) + [attack(program)]:
        assert result.stdout == "/tmp []\n"
    assert (
        attack("print({'a', 'b', 'c', 'd', 'e'})").stdout
        == attack("print({'a', 'b', 'c', 'd', 'e'})").stdout
    ), "the order of a set is the same in every run"


def test_privileges_as_the_kernel_sees_them(form):
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(run_code("import time; time.sleep(1)")))
    thread.start()
    ours = os.getpid()
    wanted = 3 if form == "strong" else 2
    assert wait_until(
        lambda: len([p for p in sandbox_watch.descendants(ours) if is_python(p)]) >= wanted
    )
    time.sleep(0.3)
    model = max(p for p in sandbox_watch.descendants(ours) if is_python(p))
    status = Path(f"/proc/{model}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines())
    assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == int(fields["CapAmb"], 16) == 0
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    if form == "strong":
        assert fields["Uid"].split()[0] != "0" and not fields["Groups"].strip(" 0")
        for kind in ("pid", "net", "mnt", "ipc", "uts"):
            assert os.readlink(f"/proc/{model}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
    thread.join()
    assert results[0].status == "ok"


def is_python(pid: int) -> bool:
    try:
        return b"in marshal.loads" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


# --- limits


def limits_for(statuses: set[str]) -> Limits:
    """Of time only where that is to be met: a slow machine must not meet it before another."""
    cpu_s, wall_s = (1 if "cpu" in statuses else 10), (0.5 if "time" in statuses else 20)
    return Limits(wall_s=wall_s, cpu_s=cpu_s, memory_mib=128, output_kib=16)


@pytest.mark.parametrize(
    ("program", "statuses"),
    [
        ("while True: pass", {"cpu"}),
        ("import time; time.sleep(99)", {"time"}),
        ("x = [0] * 10 ** 10", {"memory"}),
        ("while True: print('x' * 1000)", {"output"}),
        ("print('y' * (1 << 25), end='')", {"output"}),
        ("import os; os._exit(9)", {"error"}),
        ("import os; os.abort()", {"killed"}),
        ("def f(): f()\nf()", {"error"}),
    ],
)  # fmt: skip
def test_a_limit_is_a_result(form, program, statuses):
    assert attack(program, limits_for(statuses)).status in statuses


@pytest.mark.parametrize(
    ("program", "statuses"),
    [
        ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", {"cpu"}),
        ("10 ** 10 ** 9", {"cpu", "memory"}),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", {"time", "error"}),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", {"memory"}),
        ("import mmap; m = mmap.mmap(-1, 1 << 40)", {"memory"}),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", {"output"}),
        ("import ctypes; ctypes.string_at(0)", {"killed"}),
        ("exec('(' * 100000)", {"error", "memory", "output"}),
        ("eval('-' * 500000 + '1')", {"error", "memory", "killed"}),
        ("import sys; sys.setrecursionlimit(10 ** 9)\nx = []\nfor _ in range(10 ** 6): x = [x]\nrepr(x)", {"killed", "memory", "error"}),
    ],
)  # fmt: skip
def test_more_limits_are_results(strong, program, statuses):
    assert attack(program, limits_for(statuses)).status in statuses


@pytest.mark.parametrize(
    ("program", "statuses"),
    [
        ("import os\nwhile True: os.fork()", {"processes", "cpu", "time"}),
        ("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(0.5,)).start()", {"processes"}),
        ("import os, mmap\nm = mmap.mmap(-1, 100 << 20)\nfor _ in range(2): os.fork()\nx = b'x' * (60 << 20)\nimport time; time.sleep(9)", {"memory"}),
        ("import os, time\nfor _ in range(4):\n  if not os.fork(): break\nx = bytearray(60 << 20); time.sleep(9)", {"memory"}),
        ("open('a', 'wb').write(b'x' * (3 << 20))", {"disk"}),
        ("for i in range(9): open(str(i), 'wb').write(b'x' * (1 << 20))", {"disk"}),
        ("open('a', 'wb').truncate(1 << 50)", {"disk"}),
        ("import os\nfor i in range(10 ** 7): os.mkdir(str(i))", {"disk", "cpu"}),
        ("import os\nwhile True: os.mkdir('d'); os.chdir('d')", {"disk", "cpu", "error"}),
        ("import os\nfor i in range(10 ** 7): os.symlink('x' * 120, str(i))", {"disk", "cpu"}),
    ],
)  # fmt: skip
def test_a_limit_over_processes_and_files_is_a_result(strong, program, statuses):
    before = os.statvfs("/dev/shm").f_bavail
    assert attack(program).status in statuses
    assert not left()
    assert os.statvfs("/dev/shm").f_bavail > before - 65536


def test_a_fork_bomb_never_has_more_processes_than_allowed(strong):
    seen, done = [0], threading.Event()
    others = set(sandbox_watch.descendants(os.getpid()))  # that other tests started

    def look() -> None:
        while not done.is_set():
            seen.append(len(set(sandbox_watch.descendants(os.getpid())) - others))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        run_code(
            "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
            limits=Limits(wall_s=1, processes=4),
        )
    finally:
        done.set()
        watcher.join()
    assert not left()
    # beside bubblewrap, its init and the program inside
    assert 3 < max(seen) <= 4 + 4 + 3


# --- reaching out


HIDDEN = """
    import os
    for path in {paths!r}:
        for look in (os.listdir, lambda p: open(p, "rb").read(99)):
            try: found = look(path)
            except OSError: continue
            print("ESCAPED", path, found)
        try: os.symlink(path, "link")
        except OSError: continue
        for look in (os.listdir, lambda p: open(p, "rb").read(99)):
            try: found = look("link")
            except OSError: continue
            print("ESCAPED by a link", path, found)
        os.unlink("link")
    print("tried")
"""


def test_files_of_the_machine_are_not_there(form, tmp_path):
    (tmp_path / "secret").write_text("key")
    ssh = os.path.expanduser("~/.ssh")
    own = f"/proc/{os.getpid()}"
    paths = [
        "/etc/passwd", "/etc/shadow", "/etc/hosts", ssh, "/home", "/var/log", "/sys", "/mnt", "/run",
        "/srv", str(tmp_path), f"{tmp_path}/secret", __file__, sandbox.__file__, "/proc/1/environ",
        f"{own}/environ", f"{own}/mem", f"{own}/fd", f"{own}/root", f"{own}/cwd", "/proc/self/mem",
        "/proc/kcore", "/proc/sys/kernel", "/dev/mem", "/dev/kmsg", "/dev/tty", "/dev/ptmx",
        "/dev/pts", "/dev/fuse", "/dev/kvm", "/dev/vda", "/usr/bin", "/bin/sh", "/boot",
    ]  # fmt: skip
    r = attack(HIDDEN.format(paths=paths))
    if form == "weak" and "tried" not in r.stdout:
        pytest.fail(str(r))
    assert r.stdout == "tried\n", r


def test_nothing_can_be_written_but_the_folder(form, tmp_path):
    marker = f"spmdrl_{random.randrange(10**12)}"
    r = attack(f"""
        import os, sys, json
        places = ["/", "/usr", "/usr/lib", "/etc", "/dev", "/lib", "/root", "/home", {str(tmp_path)!r},
                  os.path.dirname(os.__file__), sys.prefix, os.path.dirname(sys.executable)]
        for place in places:
            path = os.path.join(place, {marker!r})
            for act in (lambda: open(path, "w"), lambda: os.mkdir(path), lambda: os.symlink("x", path)):
                try: act()
                except OSError: continue
                print("ESCAPED", path)
        for act in (lambda: open(json.__file__, "a"), lambda: os.chmod(json.__file__, 0o777),
                    lambda: os.utime(json.__file__), lambda: os.truncate(json.__file__, 0),
                    lambda: os.unlink(json.__file__), lambda: os.link(json.__file__, "/tmp/x")):
            try: act()
            except OSError: continue
            print("ESCAPED", act)
        try: open("/dev/shm/{marker}", "w").write("here")
        except OSError: pass
        print("tried")
    """)
    assert r.stdout == "tried\n", r
    assert not Path("/dev/shm", marker).exists() and not Path("/tmp", marker).exists()


def test_no_call_that_is_not_allowed_gets_through(form):
    tables = (
        sandbox_seccomp.FILES_READ, sandbox_seccomp.FILES_WRITTEN, sandbox_seccomp.MEMORY_AND_TIME,
        sandbox_seccomp.PROCESS_ITSELF, sandbox_seccomp.OTHER_PROCESSES, sandbox_seccomp.PAIRS,
    )  # fmt: skip
    allowed = {number for table in tables for number in table.values()}
    by_argument = {9, 16, 53, 56, 72, 157, 302}
    uprobes = {335, 336}  # which the kernel lets through every filter, and ends with SIGILL
    others = [n for n in range(600) if n not in allowed | by_argument | uprobes]
    names = {
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "keyctl": 250,
        "add_key": 248, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "mount": 165,
        "umount2": 166, "setns": 308, "pivot_root": 155, "unshare": 272, "io_uring_setup": 425,
        "socket": 41, "connect": 42, "bind": 49, "kexec_load": 246, "init_module": 175,
        "finit_module": 313, "memfd_create": 319, "shmget": 29, "msgget": 68, "semget": 64,
        "mq_open": 240, "open_by_handle_at": 304, "chroot": 161, "mknod": 133, "pidfd_getfd": 438,
        "pidfd_send_signal": 424, "open_tree": 428, "fsopen": 430, "setuid": 105,
        "memfd_secret": 447, "personality": 135, "syslog": 103, "reboot": 169, "clone3": 435,
        "landlock_create_ruleset": 444, "seccomp": 317, "vmsplice": 278, "timer_create": 222,
        "rt_sigqueueinfo": 129, "sched_setaffinity": 203, "kcmp": 312, "quotactl": 179,
    }  # fmt: skip
    assert set(names.values()) <= set(others)
    r = attack(f"""
        import ctypes, errno
        libc = ctypes.CDLL(None, use_errno=True)
        for number in {others}:
            ctypes.set_errno(0)
            if libc.syscall(number, -1, -1, -1, -1, -1, -1) != -1 or ctypes.get_errno() not in (1, 38):
                print("ESCAPED", number, ctypes.get_errno())
        CLONE, FCNTL, IOCTL, MMAP, PRCTL, SOCKETPAIR = 56, 72, 16, 9, 157, 53
        calls = [(CLONE, flag | 17, 0, 0, 0, 0) for flag in
                 (0x10000000, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x20000000, 0x40000000)]
        calls += [(FCNTL, 1, 8, {os.getpid()}), (FCNTL, 1, 1031, 1 << 20), (FCNTL, 1, 10, 9),
                  (IOCTL, 0, 0x5412, 0), (IOCTL, 0, 0x541C, 0), (IOCTL, 0, 0x5410, 0),
                  (IOCTL, 0, 0x541200005412 & 0xffffffff, 0), (IOCTL, 0, 0x8905, 0),
                  (MMAP, 0, 1 << 21, 3, 0x40022, -1, 0), (PRCTL, 22, 1, 0, 0, 0), (PRCTL, 35, 1, 0, 0, 0),
                  (SOCKETPAIR, 2, 1, 0, 0), (SOCKETPAIR, 1, 2, 0, 0), (SOCKETPAIR, 1, 5, 0, 0),
                  (SOCKETPAIR, 16, 3, 0, 0), (302, 1, 7, 0, 0)]
        for call in calls:
            ctypes.set_errno(0)
            if libc.syscall(*map(ctypes.c_long, call)) == 0 or ctypes.get_errno() != errno.EPERM:
                print("ESCAPED", call, ctypes.get_errno())
        print("tried")
    """)
    assert r.stdout == "tried\n", r


def test_a_call_by_the_doors_of_other_processors_kills(form):
    x32 = attack(
        "import ctypes; print(ctypes.CDLL(None).syscall(0x40000000 + 41, 2, 1, 0)); print('ESCAPED')"
    )
    assert x32.status == "killed" and x32.exit_code == -signal.SIGSYS
    # mov eax, 20 (getpid of 32 bits); int 0x80; ret
    r = attack("""
        import ctypes, mmap
        page = mmap.mmap(-1, 4096, prot=7)
        page.write(bytes.fromhex("b814000000cd80c3"))
        start = ctypes.addressof(ctypes.c_char.from_buffer(page))
        print(ctypes.CFUNCTYPE(ctypes.c_int)(start)())
        print("ESCAPED")
    """)
    assert r.status == "killed" and r.exit_code in (-signal.SIGSYS, -signal.SIGSEGV)


def test_no_socket_reaches_anything(form):
    import socket

    with socket.socket(socket.AF_UNIX) as server, socket.socket() as inet:
        name = f"\0spmdrl_{random.randrange(10**12)}"
        server.bind(name)
        server.listen()
        inet.bind(("127.0.0.1", 0))
        inet.listen()
        r = attack(f"""
            import socket
            for family, kind, where in ((socket.AF_UNIX, 1, {name!r}), (socket.AF_INET, 1, {inet.getsockname()!r}),
                                        (socket.AF_INET6, 2, ("::1", 9)), (socket.AF_NETLINK, 3, (0, 0)),
                                        (40, 1, (2, 9)), (17, 3, None), (socket.AF_INET, 3, None)):
                try:
                    s = socket.socket(family, kind)
                    print("ESCAPED", family)
                    s.connect(where)
                except OSError: pass
            a, b = socket.socketpair()
            for act in (lambda: a.connect({name!r}), lambda: a.bind("x"), lambda: a.listen()):
                try: act(); print("ESCAPED", act)
                except OSError: pass
            print("tried")
        """)
        assert r.stdout == "tried\n", r


def test_signals_stay_inside(form):
    got: list[int] = []
    numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGIO)
    before = {n: signal.signal(n, lambda number, _: got.append(number)) for n in numbers}
    try:
        r = attack(f"""
            import os, signal, time
            for pid in ({os.getpid()}, {os.getppid()}, -{os.getpgrp()}, 1, 2, 0, os.getppid()):
                for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGIO, 40):
                    if pid == 0: signal.signal(number, signal.SIG_IGN)
                    try: os.kill(pid, number)
                    except OSError: pass
            print("alive")
        """)
        assert r.status == "ok" and r.stdout == "alive\n", r
        for program in ("os.kill(-1, 9)", "os.kill(os.getppid(), 9)", "os.kill(os.getppid(), 19)"):
            r = attack(f"import os, time\n{program}; time.sleep(0.3)", Limits(wall_s=1, cpu_s=1))
            assert r.status in {"killed", "time", "ok"} if form == "strong" else r.status == "error"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert not got and not left()


def test_daemons_end_with_the_program(strong):
    began = time.monotonic()
    r = attack("""
        import os, signal, time
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(60)
            os._exit(0)
        time.sleep(0.2)
        print("main has ended")
    """)
    assert (r.status, r.stdout) == ("ok", "main has ended\n")
    assert time.monotonic() - began < TIGHT.wall_s and not left()


@pytest.mark.parametrize(
    "program",
    [
        "import os; os.closerange(0, 1024)",
        "import sys; sys.stdout.close()",
        "import sys; sys.stdout = None; sys.stderr = 3; sys.excepthook = 5; raise ValueError",
        "import os; os._exit = lambda code: None; os.write = os.read = None",
        "import os, sys; os.fork = sys.exit = None; sys.modules.clear()",
        "import builtins; builtins.__dict__.clear()",
        "import sys\nf = sys._getframe()\nwhile f:\n  f.f_globals.clear() if f.f_back else 0; f = f.f_back",
        "import atexit; atexit.register(lambda: 1 / 0)",
        "import threading; threading._shutdown = None",
        "import gc, sys; [o.clear() for o in gc.get_objects() if type(o) is dict and len(o) < 50]",
        "import resource as r\nfor k in (r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_NPROC, r.RLIMIT_FSIZE, r.RLIMIT_NOFILE):\n"
        "  try: r.setrlimit(k, (-1, -1)); print('ESCAPED', k)\n  except (ValueError, OSError): pass",
        "import os\nfor f in (os.setuid, os.setgid):\n  try: f(0); print('ESCAPED', os.getuid())\n  except OSError: pass",
        "import os\ntry: os.setresuid(0, 0, 0); print('ESCAPED') if os.getuid() else 0\nexcept OSError: pass",
        "import ctypes; ctypes.memset(id(None), 0, 16)",
    ],
)  # fmt: skip
def test_a_program_that_breaks_itself_breaks_nothing_else(form, program):
    attack(program)
    assert run_code("print(1)").stdout == "1\n"


def test_output_of_any_kind_is_text(form):
    raw = bytes(random.randrange(256) for _ in range(3000)) + b"\0\xff\xfe\xed\xa0\x80"
    r = attack(f"import sys; sys.stdout.buffer.write({raw!r})")
    assert r.status == "ok" and r.stdout == raw.decode("utf-8", "replace")
    r = attack("""
        import pickle, os, sys
        class Boom:
            def __reduce__(self): return os.system, ("touch /tmp/boom",)
        sys.stdout.buffer.write(pickle.dumps(Boom()))
    """)
    assert r.status == "ok" and "touch" in r.stdout
    program = "class B:\n  def __reduce__(s): return print, ('ESCAPED',)\ndef f(): return B()"
    (r,) = run_tests(program, "call", [ask_value("f", [])], TIGHT)
    assert r.returned.startswith('["error", "TypeError"')


def test_nothing_survives_a_killed_parent(form):
    program = (
        "from spmdrl.rewards.sandbox.sandbox import run_code, Limits; print('go', flush=True); "
        "run_code('import os, time; os.name == 0 or time.sleep(60)', limits=Limits(wall_s=60))"
    )
    assert not left()
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "go\n"
    assert wait_until(lambda: len(left()) >= 2)
    time.sleep(random.random() / 4)
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not left()), left()


def test_calls_at_once_do_not_disturb_each_other(form):
    def one(i: int) -> Result:
        bad = "import os\nwhile True: os.fork()" if i % 3 == 0 else f"print({i})"
        return run_code(bad, "", TIGHT)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(one, range(12)))
    for i, result in enumerate(results):
        assert i % 3 == 0 or result.stdout == f"{i}\n", result
    assert asyncio.run(sandbox.run_code_async("print(input())", "x")).stdout == "x\n"
    assert not left()


def test_a_long_input_meets_a_program_that_does_not_read(form):
    text = "line\n" * 400_000
    assert attack("print(5)", TIGHT, text).stdout == "5\n"
    assert attack("import sys; print(len(sys.stdin.read()))", TIGHT, text).stdout == "2000000\n"


# --- where there is none


def test_last_words_are_heard_though_the_end_is_seen_with_them():
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(["sh", "-c", "echo no namespace >&2"], bufsize=0, **pipes) as process:
        process.wait()  # so all that can be read is there at once
        ended = sandbox.converse(process, b"", 1, TIGHT, 10.0)
    assert (ended.ready, ended.words) == (False, b"no namespace\n")


def test_without_bubblewrap_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(sandbox.FORM_VARIABLE, raising=False)
    sandbox.try_out.cache_clear()
    for ask in (sandbox.check, lambda: run_code("1"), lambda: resolve_reward("code")):
        with pytest.raises(ConfigError, match=r"apt-get install bubblewrap.*SPMDRL_SANDBOX=weak"):
            ask()
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho bwrap: No permissions to create new namespace >&2; exit 1\n")
    bwrap.chmod(0o755)
    sandbox.bubblewrap.cache_clear()
    with pytest.raises(ConfigError, match="No permissions to create new namespace"):
        sandbox.check()
    sandbox.bubblewrap.cache_clear()
    monkeypatch.setenv(sandbox.FORM_VARIABLE, "off")
    with pytest.raises(ConfigError, match="SPMDRL_SANDBOX=off"):
        sandbox.check()


@pytest.mark.parametrize(
    "wrong", [{"wall_s": 0}, {"memory_mib": 1}, {"cpu_s": float("inf")}, {"processes": -1}]
)
def test_limits_that_make_no_sense(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Limits(**wrong)
