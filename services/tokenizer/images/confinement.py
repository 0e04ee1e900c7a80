"""Confines a process that decodes images: it can use memory and time up to limits, and nothing else.

Decoders are large programs in C that read what strangers send. After `confine`, the process opens no files and no
connections, starts no processes or threads, and can only read and write the descriptors that it has. For that, Linux
needs no privileges: limits of resources, and a filter of system calls (seccomp) where the kernel allows one.
"""

from __future__ import annotations

import ctypes
import errno
import math
import platform
import resource
import struct
import sys
from pathlib import Path
from typing import Final

_SET_NO_NEW_PRIVILEGES: Final = 38
_SET_SECCOMP: Final = 22
_FILTER_MODE: Final = 2
_ALLOW: Final = 0x7FFF0000
_REFUSE: Final = 0x00050000 | errno.EPERM
_KILL: Final = 0x80000000
# Instructions of the filter's machine: load a word, and jump if it is equal, or at least.
_LOAD: Final = 0x20
_JUMP_EQUAL: Final = 0x15
_JUMP_AT_LEAST: Final = 0x35
_RETURN: Final = 0x06
# Where a call's number and its architecture are.
_NUMBER_AT: Final = 0
_ARCHITECTURE_AT: Final = 4
# The halves of its first argument.
_ARGUMENT_AT: Final = (16, 20)
# Numbers of the other binary interface of x86-64, which has the same architecture.
_X32_CALLS: Final = 0x40000000
# By machine: its architecture in the kernel's audit, and the calls that memory, time and descriptors need, which are:
# read, write, close, fstat, lseek, mmap, mprotect, munmap, mremap, brk, madvise, rt_sigaction, rt_sigprocmask,
# rt_sigreturn, sched_yield, getpid, exit, exit_group, gettimeofday, clock_gettime, getrusage, futex, getrandom; and
# the number of prlimit64, which may only name the process itself: limits can end another one.
_CALLS: Final = {
    "x86_64": (
        0xC000003E,
        (0, 1, 3, 5, 8, 9, 10, 11, 25, 12, 28, 13, 14, 15, 24, 39, 60, 231, 96, 228, 98, 202, 318),
        302,
    ),
    "aarch64": (
        0xC00000B7,
        (63, 64, 57, 80, 62, 222, 226, 215, 216, 214, 233, 134, 135, 139, 124, 172, 93, 94, 169, 113, 165, 98,
         278),
        261,
    ),
}  # fmt: skip


def confine(memory_bytes: int) -> bool:
    """Confine this process for good, with `memory_bytes` more than it has; return whether the filter is in effect."""
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    most = used + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_CORE):
        resource.setrlimit(limit, (0, 0))
    return sys.platform.startswith("linux") and _filter_calls()


def allow_time(seconds: float) -> None:
    """Let the kernel kill this process once it has used so many seconds more of a processor."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime + seconds), hard))


def _filter_calls() -> bool:
    known = _CALLS.get(platform.machine())
    if known is None:
        return False
    program = _program(*known)
    length = len(program) // 8

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    library = ctypes.CDLL(None, use_errno=True)
    library.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
    if library.prctl(_SET_NO_NEW_PRIVILEGES, 1, None, 0, 0):
        return False
    pointer = ctypes.byref(Program(length, program))
    return bool(library.prctl(_SET_SECCOMP, _FILTER_MODE, ctypes.cast(pointer, ctypes.c_void_p), 0, 0) == 0)


def _program(architecture: int, calls: tuple[int, ...], limits_call: int) -> bytes:
    """Return a filter that allows `calls`, and `limits_call` if its first argument is 0, and refuses others.

    Calls of another architecture kill the process.
    """
    count = len(calls)
    instructions = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_AT_LEAST, count + 1, 0, _X32_CALLS),
        # To the permission, past the others and the refusal.
        *((_JUMP_EQUAL, count + 1 - i, 0, call) for i, call in enumerate(calls)),
        (_JUMP_EQUAL, 2, 0, limits_call),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _ARGUMENT_AT[0]),
        (_JUMP_EQUAL, 0, 3, 0),
        (_LOAD, 0, 0, _ARGUMENT_AT[1]),
        (_JUMP_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
