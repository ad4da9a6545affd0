"""The system calls that model-written code may make: a list of what is allowed, all else fails.

A classic BPF program in the kernel's own form (linux/filter.h, linux/seccomp.h), so that neither a
library nor a compiler is needed. What is not named fails with EPERM, what is newer than the list
with ENOSYS, which lets a C library take its older way. Not allowed, and that is the point: sockets,
ptrace and process_vm_*, mounts and namespaces, bpf, keys, io_uring, userfaultfd, modules, and all
memory that no limit counts (memfd_create, System V, POSIX queues, huge pages, larger pipes).
"""

from __future__ import annotations

import platform
import struct

NUM, ARCH, ARGS = 0, 4, 16  # byte offsets in struct seccomp_data
X86_64 = 0xC000003E  # AUDIT_ARCH_X86_64
X32_BIT = 0x40000000  # the same numbers by a second door
LAST_KNOWN = 462  # mseal; later calls are unknown to this list
LOAD, JUMP_EQUAL, JUMP_GREATER, JUMP_BITS, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000  # FAIL: with the errno in the low bits
EPERM, ENOSYS = 1, 38

FILES_READ = {
    "read": 0, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8,
    "write": 1, "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "pipe": 22,
    "select": 23, "dup": 32, "dup2": 33, "sendfile": 40, "getdents": 78, "getcwd": 79,
    "chdir": 80, "fchdir": 81, "readlink": 89, "umask": 95, "statfs": 137, "fstatfs": 138,
    "getdents64": 217, "fadvise64": 221, "epoll_create": 213, "epoll_wait": 232, "epoll_ctl": 233,
    "openat": 257, "newfstatat": 262, "readlinkat": 267, "faccessat": 269, "pselect6": 270,
    "ppoll": 271, "epoll_pwait": 281, "eventfd": 284, "eventfd2": 290, "epoll_create1": 291,
    "dup3": 292, "pipe2": 293, "preadv": 295, "pwritev": 296, "statx": 332, "close_range": 436,
    "faccessat2": 439, "epoll_pwait2": 441,
}  # fmt: skip
FILES_WRITTEN = {
    "flock": 73, "fsync": 74, "fdatasync": 75, "truncate": 76, "ftruncate": 77, "rename": 82,
    "mkdir": 83, "rmdir": 84, "creat": 85, "link": 86, "unlink": 87, "symlink": 88, "chmod": 90,
    "fchmod": 91, "utimes": 235, "mkdirat": 258, "unlinkat": 263, "renameat": 264, "linkat": 265,
    "symlinkat": 266, "fchmodat": 268, "utimensat": 280, "fallocate": 285, "renameat2": 316,
    "copy_file_range": 326,
}  # fmt: skip
MEMORY_AND_TIME = {
    "mprotect": 10, "munmap": 11, "brk": 12, "mremap": 25, "madvise": 28, "nanosleep": 35,
    "getitimer": 36, "alarm": 37, "setitimer": 38, "gettimeofday": 96, "times": 100, "time": 201,
    "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "membarrier": 324,
}  # fmt: skip
PROCESS_ITSELF = {
    "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "sched_yield": 24, "pause": 34,
    "getpid": 39, "exit": 60, "uname": 63, "getrlimit": 97, "getrusage": 98, "sysinfo": 99,
    "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "getpgrp": 111,
    "getgroups": 115, "getresuid": 118, "getresgid": 120, "getpgid": 121, "getsid": 124,
    "rt_sigpending": 127, "rt_sigtimedwait": 128, "rt_sigsuspend": 130, "sigaltstack": 131,
    "getpriority": 140, "arch_prctl": 158, "setrlimit": 160, "gettid": 186, "futex": 202,
    "sched_getaffinity": 204, "set_tid_address": 218, "exit_group": 231, "set_robust_list": 273,
    "getrandom": 318, "rseq": 334,
}  # fmt: skip
OTHER_PROCESSES = {
    "fork": 57, "vfork": 58, "execve": 59, "wait4": 61, "kill": 62, "setpgid": 109, "setsid": 112,
    "setgroups": 116, "setresuid": 117, "setresgid": 119, "tkill": 200,
    "tgkill": 234, "waitid": 247, "pidfd_open": 434,
}  # fmt: skip
PAIRS = {"sendto": 44, "recvfrom": 45, "sendmsg": 46, "recvmsg": 47, "shutdown": 48,
         "getsockname": 51, "getpeername": 52, "getsockopt": 55}  # fmt: skip
# for the commands of a terminal, which has a network without any other machine
TERMINAL = {
    "connect": 42, "accept": 43, "bind": 49, "listen": 50, "setsockopt": 54, "accept4": 288,
    "recvmmsg": 299, "sendmmsg": 307, "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260,
    "mknod": 133, "mknodat": 259, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190,
    "getxattr": 191, "lgetxattr": 192, "fgetxattr": 193, "listxattr": 194, "llistxattr": 195,
    "flistxattr": 196, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199,
    "inotify_add_watch": 254, "inotify_rm_watch": 255, "inotify_init1": 294, "mincore": 27,
    "setuid": 105, "setgid": 106, "setreuid": 113, "setregid": 114, "setpriority": 141,
    "sched_getparam": 143, "sched_getscheduler": 145, "sched_get_priority_max": 146,
    "sched_get_priority_min": 147, "sync": 162, "sched_setaffinity": 203, "timer_create": 222,
    "timer_settime": 223, "timer_gettime": 224, "timer_delete": 226, "splice": 275, "tee": 276,
    "timerfd_create": 283, "timerfd_settime": 286, "timerfd_gettime": 287, "signalfd4": 289,
    "syncfs": 306, "futimesat": 261, "capget": 125, "capset": 126,
}  # fmt: skip

MMAP, IOCTL, SOCKET, SOCKETPAIR, CLONE = 9, 16, 41, 53, 56
FCNTL, PRCTL, PRLIMIT, CLONE3 = 72, 157, 302, 435
OPEN, OPENAT = 2, 257
HUGE_PAGES = 0x40000
NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
CLONE_THREAD = 0x10000
WRITING = 0o1 | 0o2 | 0o100 | 0o1000 | 0o20000000  # O_WRONLY, RDWR, CREAT, TRUNC, TMPFILE
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: no terminal can be typed into
IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# F_DUPFD .. F_SETLKW, F_OFD_*, F_DUPFD_CLOEXEC, F_GETPIPE_SZ: no F_SETOWN, which sends signals
FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
PRCTLS = (1, 2, 3, 4, 15, 16, 39)  # death signal, dumpable, name, no_new_privs (to read)
KEEPCAPS = 8  # of setpriv; what it becomes has no capability left that it could keep
FAMILIES = (1, 2, 10)  # of sockets of a terminal: AF_UNIX, AF_INET, AF_INET6
UNIX, STREAM_KINDS = 1, (1, 1 | 0o4000, 1 | 0o2000000, 1 | 0o2004000)

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def program(read_only: bool = False, terminal: bool = False) -> bytes:
    """An array of struct sock_filter for bwrap --seccomp or prctl(PR_SET_SECCOMP).

    read_only: nothing may be written, no process made and none signalled, for use without
    namespaces. terminal: what shells and their commands need as well, sockets among it. Raises
    OSError on another processor than x86-64.
    """
    if platform.machine() != "x86_64":
        raise OSError(f"the sandbox knows the system calls of x86-64, not of {platform.machine()}")
    allowed = {**FILES_READ, **MEMORY_AND_TIME, **PROCESS_ITSELF, **PAIRS}
    if read_only:
        del allowed["open"], allowed["openat"]
    else:
        allowed |= {**FILES_WRITTEN, **OTHER_PROCESSES, **(TERMINAL if terminal else {})}
    code: list[Instruction] = [
        (LOAD, 0, 0, ARCH), (JUMP_EQUAL, 1, 0, X86_64), (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUM), (JUMP_GREATER, 0, 1, X32_BIT - 1), (RETURN, 0, 0, KILL),
        (JUMP_GREATER, 0, 1, LAST_KNOWN), (RETURN, 0, 0, FAIL | ENOSYS),
        (JUMP_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, FAIL | ENOSYS),  # its flags are in memory
    ]  # fmt: skip
    for number in sorted(allowed.values()):
        code += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    rules = conditions(read_only)
    if terminal:
        rules[SOCKET] = one_of(0, FAMILIES)
        rules[PRCTL] = one_of(0, (*PRCTLS, KEEPCAPS))
    for number, tests in rules.items():
        code += when(number, tests)
    code.append((RETURN, 0, 0, FAIL | EPERM))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def conditions(read_only: bool) -> dict[int, list[Instruction]]:
    """Returns, by number of a call that depends on its arguments, the code that allows it or goes
    to its end.
    """
    rules = {
        MMAP: [(LOAD, 0, 0, ARGS + 24), (JUMP_BITS, 1, 0, HUGE_PAGES), (RETURN, 0, 0, ALLOW)],
        IOCTL: one_of(1, IOCTLS),
        FCNTL: one_of(1, tuple(c for c in FCNTLS if not read_only or c not in (6, 7, 37, 38))),
        PRCTL: one_of(0, PRCTLS),
        PRLIMIT: one_of(0, (0,)),  # its own limits, which it cannot raise
        SOCKETPAIR: [(LOAD, 0, 0, ARGS), (JUMP_EQUAL, 0, 9, UNIX), *one_of(1, STREAM_KINDS)],
        CLONE: [(LOAD, 0, 0, ARGS), (JUMP_BITS, 1, 0, NEW_NAMESPACES), (RETURN, 0, 0, ALLOW)],
    }
    if read_only:
        rules[CLONE] = [(LOAD, 0, 0, ARGS), (JUMP_BITS, 2, 0, NEW_NAMESPACES),
                        (JUMP_BITS, 0, 1, CLONE_THREAD), (RETURN, 0, 0, ALLOW)]  # fmt: skip
        for number, argument in ((OPEN, 1), (OPENAT, 2)):
            place = ARGS + 8 * argument
            rules[number] = [(LOAD, 0, 0, place), (JUMP_BITS, 1, 0, WRITING), (RETURN, 0, 0, ALLOW)]
    return rules


def one_of(argument: int, values: tuple[int, ...]) -> list[Instruction]:
    """The low word decides: the kernel reads these arguments as 32 bits."""
    code: list[Instruction] = [(LOAD, 0, 0, ARGS + 8 * argument)]
    for value in values:
        code += [(JUMP_EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW)]
    return code


def when(number: int, tests: list[Instruction]) -> list[Instruction]:
    """Past the denial at the end of `tests` the call's number is still what is loaded."""
    return [(JUMP_EQUAL, 0, len(tests) + 1, number), *tests, (RETURN, 0, 0, FAIL | EPERM)]
