"""The confinement of one untrusted program: bubblewrap, a filter of system calls, limits, and a monitor.

    launcher      the process that starts jails: one request, one jail, one answer
    bubblewrap    the file system and the namespaces of a jail, as arguments of `bwrap`
    seccomp       the filter of system calls, compiled by libseccomp
    cgroup        the control group that limits the memory of a jail, if one is available
    monitor       watches a jail from outside: output, wall time, CPU, memory, processes; kills it
    process_tree  use of the machine by a jail's processes, read from /proc
    init          process 1 of a jail: starts the program, reaps, returns files
    messages      the messages between these processes

The modules use only the standard library and import each other relatively. The launcher loads them from this
folder alone, so that it starts in milliseconds and has no secrets. The public interface is
`reward_service.sandbox`.
"""
