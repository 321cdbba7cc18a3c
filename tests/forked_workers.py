"""Workers of the tests' Ray cluster, forked from one process that has imported LeRobot, which costs each 8 s of CPU.

`python -m tests.forked_workers FD` is that process; with a worker's arguments, this file is run by Ray in place of its
`setup_worker.py`.
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

ADDRESS = "TEST_FORKED_WORKERS"
# None imports Ray, which reads a worker's environment then.
PRELOADED = ("policies.loading", "policies.tiny_pi05", "envs.two_bins")


@contextlib.contextmanager
def forking(folder):
    """Start the process that is forked, with a socket in `folder`; it ends with this context. Yield its environment."""
    address = str(Path(folder) / "fork")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(16)
        fd, root = listener.fileno(), Path(__file__).parent.parent
        command = [sys.executable, "-m", "tests.forked_workers", str(fd)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[fd], cwd=root)
    with process:  # which closes its standard input
        yield {ADDRESS: address}


def serve(listener):
    """Fork a process for each worker that is asked for, and return in it what it is to be."""
    for name in PRELOADED:
        importlib.import_module(f"vla_finetuning.{name}")
    assert "ray" not in sys.modules
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        connection, _ = listener.accept()
        with connection:
            message, fds, _, _ = socket.recv_fds(connection, 2**20, 3)
            while not message.endswith(b"\n"):
                message += connection.recv(2**20)
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setpgid(0, 0)
                for number, fd in enumerate(fds):
                    os.dup2(fd, number)
                return json.loads(message)
            for fd in fds:
                os.close(fd)


def become(worker):
    """Be a worker of Ray."""
    import numpy as np

    os.chdir(worker["cwd"])
    os.environ.clear()
    os.environ.update(worker["environ"])
    np.random.seed()
    sys.argv = worker["argv"]
    runpy.run_path(sys.argv[0], run_name="__main__")


def ask_for_worker():
    """Ask for a process that is the worker that Ray asks this one to be."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    options, argv = parser.parse_known_args()
    context = json.loads(options.serialized_runtime_env_context)
    variables = context.get("env_vars") or {}
    if context.get("command_prefix") or "PYTHONPATH" in variables:  # it is to have other code
        from ray._private.workers import setup_worker

        os.execv(sys.executable, [sys.executable, setup_worker.__file__, *sys.argv[1:]])
    os.environ.update({name: os.path.expandvars(value) for name, value in variables.items()})
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[ADDRESS])
        worker = {"argv": argv, "environ": dict(os.environ), "cwd": os.getcwd()}
        socket.send_fds(connection, [json.dumps(worker).encode() + b"\n"], [0, 1, 2])
        connection.recv(1)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        ask_for_worker()
    else:
        become(serve(socket.socket(fileno=int(sys.argv[1]))))
