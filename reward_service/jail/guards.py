"""What the untrusted program itself is bound by, set up in its own process just before it is run."""

from __future__ import annotations

import os
import resource
import signal
from typing import Any

from reward_service.jail import linux, seccomp


class Guards:
    """Taken on one after another by the process that becomes the program."""

    def __init__(self, request: dict[str, Any], uid: int | None, work: str) -> None:
        """`uid`: the user to become, as its own namespace counts; none to stay who one is."""
        self._request = request
        self._uid = uid
        self._work = work

    def take(self) -> None:
        """Raises OSError or ValueError; the program is then not run."""
        os.setsid()
        for number in signal.valid_signals():
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                try:
                    signal.signal(number, signal.SIG_DFL)
                except OSError:
                    continue  # the C library keeps two for itself
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.umask(0o022)
        os.chdir(self._work)
        limits = self._request["limits"]
        self._limit(limits)
        linux.bound_capabilities()
        if self._uid is not None:
            os.setgroups([])
            os.setresgid(self._uid, self._uid, self._uid)
            os.setresuid(self._uid, self._uid, self._uid)
        linux.drop_capabilities()
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        if self._request["maker"]:
            code = seccomp.program(linux.MACHINE, grouped=self._request["grouped"])
            if code is not None:
                seccomp.install(code)

    def _limit(self, limits: dict[str, Any]) -> None:
        cpu_s = int(limits["cpu_s"]) + 1
        memory = int(limits["memory_mb"]) << 20
        wanted = {
            resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
            resource.RLIMIT_FSIZE: (int(limits["files_mb"]) << 20,) * 2,
            resource.RLIMIT_NOFILE: (int(limits["open_files"]),) * 2,
            resource.RLIMIT_NPROC: (int(limits["processes"]) + self._request["others"],) * 2,
            resource.RLIMIT_CORE: (0, 0),
            resource.RLIMIT_MEMLOCK: (0, 0),
            resource.RLIMIT_MSGQUEUE: (0, 0),
            resource.RLIMIT_RTPRIO: (0, 0),
            resource.RLIMIT_SIGPENDING: (64, 64),
        }
        if limits["address_space"]:
            wanted[resource.RLIMIT_AS] = (memory, memory)
        for which, (soft, hard) in wanted.items():
            most = resource.getrlimit(which)[1]
            if most != resource.RLIM_INFINITY:
                soft, hard = min(soft, most), min(hard, most)
            resource.setrlimit(which, (soft, hard))
