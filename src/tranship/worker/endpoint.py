"""The endpoint of a run: clients ask the engine that samples for training, between its steps."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from tranship.models.tokenizer import load_tokenizer
from tranship.rollout import RolloutEngine
from tranship.serve import Address, Desk, Endpoint, HttpServer, Served, SharedEngine, listen, read_token, url_of
from tranship.serve.desk import stopping
from tranship.stages.env_setup import make_agents
from tranship.types import RunError
from tranship.worker.spec import WorkerSpec, endpoint_file

_JOIN_S = 30.0


class InRunEndpoint:
    """An HTTP server in a thread, and `engine`: what the rollout stage steps in place of the one it was made from.
    agents: the world of the rollout stage's samples, where agents make them.

    RUN/serve/NAME.json, which its owner alone can read, says where it is: url, token, model. It goes when this closes;
    that of a process which was killed is for its supervisor to remove.
    """

    def __init__(self, spec: WorkerSpec, name: str, engine: RolloutEngine, wakeup: threading.Event) -> None:
        """Raises UserError if the address cannot be had. name: of the process."""
        config, folder = spec.config.serve, Path(spec.model_dir)
        self._desk = Desk(engine, wakeup.set)
        self.engine = SharedEngine(engine, self._desk)
        trusted = spec.config.model.trust_remote_code
        tokenizers = [load_tokenizer(folder, trusted) for _ in range(2)]
        served = Served(config.name, *tokenizers, max_tokens=spec.max_tokens)
        self.agents = None
        if config.agents:
            self.agents = make_agents(
                config,
                served.prompt_tokenizer,
                end_ids=spec.eos_token_ids,
                template_args=spec.config.data.template_args,
                run_seed=spec.config.run.seed,
                wakeup=wakeup.set,
            )
        token = read_token(None)
        self._socket = listen(Address(config.host, config.port, token))
        self._file = endpoint_file(spec.config.run.dir, name)
        facts = {"url": url_of(self._socket), "token": token, "model": config.name}
        endpoint = Endpoint(served, self._desk, token, self.agents)
        self._server = HttpServer(endpoint, self._desk, lambda: _write(self._file, facts))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="endpoint", daemon=True)

    def start(self) -> None:
        """Take requests, in a thread. Once everything that may start processes of its own has done so."""
        self._thread.start()

    def close(self) -> None:
        """Tell clients that it stops, and end the thread. Between two steps of the engine, on its thread."""
        self._file.unlink(missing_ok=True)
        self._desk.end(stopping())
        self._desk.close(stopping())
        self._server.should_exit = True
        self._thread.join(_JOIN_S)
        self._socket.close()
        if self._thread.is_alive():
            raise RunError(f"the thread of the endpoint did not end within {_JOIN_S:.0f} s")


def _write(file: Path, facts: dict[str, str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.part")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as opened:
        opened.write(json.dumps(facts, indent=1) + "\n")
    temporary.replace(file)
