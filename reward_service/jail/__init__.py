"""The jail: what confines one untrusted program. Standard library only, so that its process starts in
milliseconds and holds nothing worth stealing. The public face is `reward_service.sandbox`.

    jailer     the process that makes jails: one request, one jail, one answer
    memory     the control group that holds the memory of a jail, where one can be had
    keeper     watches a jail from outside: output, wall time, CPU, memory, processes; kills it
    warden     process 1 of a jail: builds its file system, starts the program, reaps, hands back files
    guards     what the program itself is bound by: limits, no privileges, a filter of system calls
"""
