"""Runs one program with no rights but open files: `python -I -S sandbox.py LIMITS -- PROGRAM…`.

Landlock leaves only the programs and libraries of the system, `/dev/null`, and the given
descriptors. One descriptor is for writing, all others are for reading. A seccomp filter denies,
among others, sockets, processes, signals, and calls that change files by path. Both restrictions
last until the program ends. The sandbox needs no privilege, no namespace and no other package. This
file imports nothing of virtbus, so that the sandbox starts in 20 ms. ADR 0041 has the reasons.
"""

import contextlib
import ctypes
import errno
import os
import platform
import resource
import struct
import sys

UNAVAILABLE = 125
"""The exit code if the sandbox cannot be made; the reason is on stderr."""
NOBODY = 65534
ENVIRONMENT = {"LC_ALL": "C", "MALLOC_ARENA_MAX": "1"}
"""The program's environment. glibc reserves 64 MiB of address space for each further arena."""
_STACK_BYTES = 1 << 20
"""A thread's stack. qemu-img has up to 64 threads on a slow disk. With the default stack of 8 MiB,
the threads' stacks alone would take half of the address space."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SIGKILL = 9

# --- Landlock: linux/landlock.h -----------------------------------------------------------------
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1, 2, 4, 8, 1 << 14
_PROGRAMS = _EXECUTE | _READ_FILE | _READ_DIR
READABLE = {
    **dict.fromkeys(("/usr", "/lib", "/lib64", "/bin"), _PROGRAMS),
    "/etc/ld.so.cache": _READ_FILE,
    "/dev/null": _READ_FILE | _WRITE_FILE,
}
"""Paths of the host that stay accessible, each with the rights on it."""
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""By version of Landlock, all rights on files. A version that is not listed has the rights of the
version before."""
_NET_RIGHTS, _SCOPES = 3, 3
"""_NET_RIGHTS (since version 4 of Landlock): bind and connect TCP sockets. _SCOPES (since version
6): connect to abstract sockets, and send signals, outside the sandbox."""

# --- seccomp: linux/seccomp.h, linux/bpf_common.h, asm/unistd_64.h ------------------------------
_ARCH_X86_64 = 0xC000003E
_X32 = 0x4000_0000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF_0000, 0x8000_0000, 0x0005_0000
_NR, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
_CLONE, _CLONE3, _CLONE_THREAD, _PRLIMIT = 56, 435, 0x10000, 302
DENIED = {
    "sockets": (41, 42, 43, 44, 45, 46, 47, 49, 50, 53, 288, 299, 307),
    "processes": (57, 58, 101, 141, 142, 144, 203, 251, 256, 279, 310, 311, 312, 314, 322, 434,
                  438, 440, 448),
    "signals": (62, 129, 200, 234, 297, 424),
    "files by path": (76, 86, 88, 90, 92, 94, 132, 133, 188, 189, 197, 198, 235, 259, 260, 261,
                      265, 266, 268, 280, 452),
    "namespaces and mounts": (155, 161, 165, 166, 167, 168, 272, 308, 428, 429, 430, 431, 432, 433,
                              442),
    "shared memory and queues": (29, 30, 31, 64, 65, 66, 68, 69, 70, 71, 220, 240, 241, 242, 243),
    "the kernel": (103, 135, 153, 159, 163, 169, 172, 173, 174, 175, 176, 179, 246, 248, 249, 250,
                   298, 303, 304, 305, 313, 320, 321, 323, 425, 426, 427),
}  # fmt: skip
"""Numbers of the system calls that fail with EPERM."""


def landlock_version() -> int:
    """Return the kernel's version of Landlock; 0 if it has none."""
    return max(0, int(_LIBC.syscall(_CREATE_RULESET, None, 0, 1)))


def restrict_files(version: int, sources: tuple[int, ...], target: int) -> None:
    """Leave only the `READABLE` paths, `sources` for reading, and `target` for writing."""
    rights = _FILE_RIGHTS[max(known for known in _FILE_RIGHTS if known <= version)]
    fields = [rights] + [_NET_RIGHTS] * (version >= 4) + [_SCOPES] * (version >= 6)
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = _checked(
        _LIBC.syscall(_CREATE_RULESET, attributes, len(attributes), 0), "create a ruleset"
    )
    for path, allowed in READABLE.items():
        with contextlib.suppress(FileNotFoundError):
            _allow(ruleset, os.open(path, os.O_PATH | os.O_CLOEXEC), allowed)
    for source in sources:
        _allow(ruleset, source, _READ_FILE)
    _allow(ruleset, target, (_READ_FILE | _WRITE_FILE | _TRUNCATE) & rights)
    _checked(_LIBC.syscall(_RESTRICT_SELF, ruleset, 0), "restrict itself")
    os.close(ruleset)


def _allow(ruleset: int, descriptor: int, rights: int) -> None:
    rule = struct.pack("=Qi", rights, descriptor)
    _checked(_LIBC.syscall(_ADD_RULE, ruleset, 1, rule, 0), "add a rule")


def seccomp_program() -> bytes:
    """Return the filter: calls in `DENIED` fail, threads and file I/O stay allowed.

    A call of another architecture ends the process.
    """
    code = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _ARCH_X86_64),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        # After ENOSYS glibc falls back to clone, whose flags the filter can read.
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_EQUAL, 0, 4, _CLONE),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 4, _PRLIMIT),  # allowed only on the process itself
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for number in sorted(number for group in DENIED.values() for number in group):
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in code)


def _restrict_calls() -> None:
    program = ctypes.create_string_buffer(seccomp_program())
    length = (len(program) - 1) // 8
    header = struct.pack("@HP", length, ctypes.addressof(program))
    _checked(_LIBC.prctl(_PR_SET_SECCOMP, 2, header, 0, 0), "install a seccomp filter")


def _drop_user() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def _limit(address_bytes: int, file_bytes: int, cpu_s: int) -> None:
    limits = {
        resource.RLIMIT_AS: address_bytes,
        resource.RLIMIT_STACK: _STACK_BYTES,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_MEMLOCK: 0,
    }
    for kind, most in limits.items():
        resource.setrlimit(kind, (most, most))


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot {what}: {os.strerror(number)}")
    return result


def enter(sources: tuple[int, ...], target: int, limits: tuple[int, int, int], parent: int) -> None:
    """Enter the sandbox for good, and let this process end when the process `parent` ends.

    `limits` are the bytes of address space, the bytes of a file, and the seconds of CPU time.

    Raises:
        OSError: the kernel lacks a part of the sandbox, or the parent has ended.
    """
    version = landlock_version()
    if not version or platform.machine() != "x86_64":
        raise OSError(errno.ENOSYS, "this kernel has no Landlock, or this machine is no x86_64")
    _checked(_LIBC.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0), "follow its parent")
    _drop_user()
    _checked(_LIBC.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0), "follow its parent")
    if os.getppid() != parent:  # the parent ended before the call of prctl
        raise OSError(errno.ESRCH, "the parent has ended")
    _checked(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "set no_new_privs")
    _limit(*limits)
    restrict_files(version, sources, target)
    _restrict_calls()


def main(argv: list[str]) -> None:
    """Enter the sandbox, and become the program.

    The numbers before `--` are the pid of the parent, a descriptor to read, a descriptor to write,
    the three limits of `enter`, and more descriptors to read.
    """
    end = argv.index("--")
    parent, source, target, *numbers = map(int, argv[:end])
    program = argv[end + 1 :]
    try:
        enter((source, *numbers[3:]), target, (numbers[0], numbers[1], numbers[2]), parent)
        os.execve(program[0], program, ENVIRONMENT)  # noqa: S606  the program of our caller
    except OSError as error:
        os.write(2, f"sandbox: {error.strerror}".encode())
        os._exit(UNAVAILABLE)


if __name__ == "__main__":
    main(sys.argv[1:])
