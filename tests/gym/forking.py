"""NeMo-Gym imported once: this process forks itself for every module that a test runs in NeMo-Gym's environment.

    python -m tests.gym.forking CONTROL      # the number of a socket; ends with it

A message on the socket says which module, with where its output goes and where its end is told.
"""

import importlib
import json
import os
import runpy
import signal
import socket
import sys
from typing import Any

MODULES = (
    "responses_api_agents.simple_agent.app",
    "responses_api_agents.simple_agent_with_compaction.app",
    "responses_api_models.vllm_model_with_compaction.app",
    "uvicorn",
    "workers.gym.policy_model.compaction",
    "workers.gym.recording",
    "workers.gym.safe.app",
    "workers.gym.servers",
    "workers.gym.swe_lite.app",
)
LARGEST_MESSAGE = 100_000


def main(control: socket.socket) -> None:
    """Fork until the other end is closed."""
    for name in MODULES:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that attend
    while True:
        message, files, _, _ = socket.recv_fds(control, LARGEST_MESSAGE, 2)
        if not message:
            return
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            output, told = files
            attend(json.loads(message), output, socket.socket(fileno=told))
            os._exit(0)
        for file in files:
            os.close(file)


def attend(asked: dict[str, Any], output: int, told: socket.socket) -> None:
    """Tell the id of the process and, at its end, the exit code; its id is nobody else's until that was read."""
    process = os.fork()
    if process == 0:
        told.close()
        run(output, **asked)
    os.close(output)
    told.sendall(b"%d\n" % process)
    ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    try:
        told.sendall(b"%d\n" % code)
        told.recv(1)
    except ConnectionError:
        pass  # nobody is interested


def run(output: int, module: str, arguments: list[str], variables: dict[str, str], folder: str) -> None:
    """`python -m module arguments`, to its end."""
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.environ.update(variables)
    os.chdir(folder)
    sys.argv[1:] = arguments
    code = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # as workers.gym.serve: what NeMo-Gym's dependencies do at exit takes seconds
