"""A port that is proved ours, and the wait until the server on it serves our model. Knows no engine."""

from __future__ import annotations

import http.client
import json
import socket
import time

from autotune.outcome import EngineError
from autotune.runtimes.server import failures
from autotune.runtimes.server.process import Kept

HOST = "127.0.0.1"
POLL_S = 0.05


def free_port(wanted: int = 0) -> int:
    """``wanted`` if nothing listens there, else any port that is free now."""
    for port in dict.fromkeys((wanted, 0)):
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            number: int = probe.getsockname()[1]
            return number
    raise failures.named("port", f"no free port on {HOST}", "launch")


def wait(kept: Kept, port: int, model: str, seconds: float, local: bool = True) -> None:
    """Until the server on ``port`` is ``kept``'s and lists ``model``.

    ``local``: the engine's processes are ours to see, so that a listening socket must belong to them; elsewhere (in a
    container, over ssh) the name alone proves it, which no other server knows.
    Raises EngineError(phase="launch"): at once when it ends, when another server answers, or after ``seconds``.
    """
    end = kept.started + seconds
    while True:
        code = kept.code()
        if code is not None:
            raise ended(kept, code)
        names = served(port)
        if names is not None:
            if local and not kept.listens(port):
                # It may have ended, or a foreign server has taken the port in the moment before ours would.
                raise failures.named("port", f"a server that we did not start answers on port {port}", "launch",
                                     kept.tail())  # fmt: skip
            if model in names:
                return
            if names:
                raise failures.named("port", f"the server on port {port} serves {', '.join(names)}, not {model}",
                                     "launch", kept.tail())  # fmt: skip
        if time.monotonic() > end:
            raise failures.named("startup_timeout", f"not ready after {seconds:g} s", "launch", kept.tail())
        time.sleep(POLL_S)


def ended(kept: Kept, code: int) -> EngineError:
    """Why a launch ended, from its log."""
    if kept.refusal:
        return failures.named("unsupported", f"the engine's command cannot be run: {kept.refusal}", "launch")
    return failures.error(failures.recognise(kept.text(), code), "launch", kept.tail())


def served(port: int) -> list[str] | None:
    """Model names that the server on ``port`` lists; [] while it is loading, None when nothing answers."""
    connection = http.client.HTTPConnection(HOST, port, timeout=2)
    try:
        connection.request("GET", "/v1/models")
        answer = connection.getresponse()
        table = json.loads(answer.read())
        return [str(entry["id"]) for entry in table["data"]] if answer.status == 200 else []
    except (ConnectionError, TimeoutError, http.client.RemoteDisconnected):
        return None
    except (OSError, http.client.HTTPException):
        return None
    except (ValueError, KeyError, TypeError):
        return ["something that is no list of models"]
    finally:
        connection.close()
