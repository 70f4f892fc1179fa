"""`python confine.py PROGRAM ARGUMENT...`: starts a program under a seccomp filter that its children inherit.

The filter refuses socket families that a network namespace does not isolate (`AF_VSOCK` reaches the hypervisor),
memory that no limit counts (`memfd_create`, `memfd_secret`, System V shared memory), `io_uring`, whose operations
bypass filters, and system calls of other architectures. The script runs for every command, so it has few imports.
"""

import ctypes
import os
import signal
import struct
import sys

ALLOWED_FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
_MACHINES = {  # by os.uname().machine: AUDIT_ARCH, the number of socket(2), and the refused system calls
    "x86_64": (0xC000003E, 41, (29, 319, 425, 447)),  # shmget, memfd_create, io_uring_setup, memfd_secret
    "aarch64": (0xC00000B7, 198, (194, 279, 425, 447)),
}
_X32_BIT = 0x40000000  # system calls of the x32 ABI have this bit
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # BPF instructions
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16  # offsets in `struct seccomp_data`
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_ENOSYS, _EAFNOSUPPORT = 38, 97
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2  # prctl(2)


def is_known(machine: str) -> bool:
    """Return True if there is a filter for the machine (`os.uname().machine`)."""
    return machine in _MACHINES


def seccomp_filter(machine: str) -> bytes:
    """Return the filter as an array of `struct sock_filter`."""
    arch, socket_number, refused = _MACHINES[machine]
    steps = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    steps += [(_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    for number in refused:
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    steps += [(_EQUAL, 1, 0, socket_number), (_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, _ARGUMENT)]
    for family in ALLOWED_FAMILIES:
        steps += [(_EQUAL, 0, 1, family), (_RETURN, 0, 0, _ALLOW)]
    steps += [(_RETURN, 0, 0, _ERRNO | _EAFNOSUPPORT)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def main() -> None:
    program = seccomp_filter(os.uname().machine)
    instructions = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions)))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_NO_NEW_PRIVILEGES, 1, 0), (_SET_SECCOMP, _FILTER, ctypes.byref(header))):
        if libc.prctl(*arguments, 0, 0):
            sys.exit(f"confine: seccomp is not available: {os.strerror(ctypes.get_errno())}")
    # Python ignores these signals; the program must not inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
