"""The confinement of one untrusted program: bubblewrap, a filter of system calls, limits, and a monitor.

    launcher      the process that starts jails: one request, one jail, one answer
    bubblewrap    the file system and the namespaces of a jail, as arguments of `bwrap`
    seccomp       the filter of system calls, compiled by libseccomp
    cgroup        the control group that holds the memory of a jail, where one can be had
    monitor       watches a jail from outside: output, wall time, CPU, memory, processes; kills it
    process_tree  what the processes of a jail use, read from /proc
    init          process 1 of a jail: starts the program, reaps, hands back files
    messages      what these processes tell each other

The modules use the standard library only and import each other relatively. The launcher loads them from this
folder alone, so that it starts in milliseconds and has no secrets in memory. The public face is
`reward_service.sandbox`.
"""
